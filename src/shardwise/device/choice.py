"""Which device a process computes on."""

from __future__ import annotations

import torch

from shardwise.errors import LaunchError


def device_index(local_rank: int) -> int:
    """Return the index of a process's CUDA device, which there may be none of.

    A process that sees a single device was given that one by its launcher (Slurm's `--gpus-per-task=1`, containers).
    """
    return 0 if torch.cuda.device_count() == 1 else local_rank


def choose_device(local_rank: int, index: int | None = None) -> torch.device:
    """Return this process's device: its own CUDA device where there is one, else the CPU.

    Args:
        local_rank: rank on this machine; names the CUDA device, where several are visible.
        index: device index that overrides the local rank.

    Raises:
        LaunchError: there are fewer CUDA devices than processes on this machine.
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
