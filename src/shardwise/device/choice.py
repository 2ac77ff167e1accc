"""Choice of the device that a process computes on."""

from __future__ import annotations

import torch

from shardwise.errors import LaunchError


def device_index(local_rank: int) -> int:
    """Return the index of a process's CUDA device; the device may not exist.

    Because launchers may give each process a single visible device (Slurm's `--gpus-per-task=1`, containers), the index
    is then 0.
    """
    return 0 if torch.cuda.device_count() == 1 else local_rank


def choose_device(local_rank: int, index: int | None = None) -> torch.device:
    """Return this process's CUDA device, or the CPU if CUDA is not available.

    Args:
        local_rank: rank on this machine, which is the CUDA device index if several devices are visible.
        index: device index that overrides the local rank.

    Raises:
        LaunchError: the machine has fewer CUDA devices than processes.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    visible = torch.cuda.device_count()
    wanted = device_index(local_rank) if index is None else index
    if wanted >= visible:
        raise LaunchError(
            f"local rank {wanted} has no CUDA device: {visible} visible. Start fewer processes "
            "(--nproc) or make more devices visible (CUDA_VISIBLE_DEVICES)."
        )
    torch.cuda.set_device(wanted)
    return torch.device("cuda", wanted)
