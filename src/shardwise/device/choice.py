"""Which device a process computes on."""

from __future__ import annotations

import torch

from shardwise.errors import LaunchError


def choose_device(local_rank: int, index: int | None = None) -> torch.device:
    """Return this process's device: its own CUDA device where there is one, else the CPU.

    Args:
        local_rank: rank on this machine; names the CUDA device.
        index: device index that overrides the local rank.

    Raises:
        LaunchError: there are fewer CUDA devices than processes on this machine.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    wanted = local_rank if index is None else index
    if wanted >= torch.cuda.device_count():
        raise LaunchError(
            f"local rank {wanted} has no CUDA device: {torch.cuda.device_count()} visible. Start fewer processes "
            "(--nproc) or make more devices visible (CUDA_VISIBLE_DEVICES)."
        )
    torch.cuda.set_device(wanted)
    return torch.device("cuda", wanted)
