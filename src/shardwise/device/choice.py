"""Choice of the device that a process computes on."""

from __future__ import annotations

import torch

from shardwise.errors import LaunchError


def device_index(local_rank: int) -> int:
    """Return the index of a process's CUDA device, which may not exist; 0 if the launcher shows only one (Slurm)."""
    return 0 if torch.cuda.device_count() == 1 else local_rank


def choose_device(local_rank: int, index: int | None = None) -> torch.device:
    """Return this process's CUDA device (`index` overrides the local rank), or the CPU if CUDA is not available.

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
