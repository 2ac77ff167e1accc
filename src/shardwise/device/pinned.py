"""Pinned (page-locked) host memory: what a CUDA device copies to and from without a detour and without waiting."""

from __future__ import annotations

import contextlib
from typing import Any

import torch


def pin(address: int, size: int) -> bool:
    """Pin memory of this process that is mapped already; return whether it was done.

    It needs a CUDA device that is in use, and a system that allows so much locked memory.
    """
    if not torch.cuda.is_available():
        return False
    return _succeeds(torch.cuda.cudart().cudaHostRegister, address, size, 0)


def unpin(address: int) -> None:
    """Undo `pin`, before the memory is unmapped."""
    _succeeds(torch.cuda.cudart().cudaHostUnregister, address)


def _succeeds(function: Any, *arguments: int) -> bool:
    try:
        if int(function(*arguments)) == 0:
            return True
    except RuntimeError:
        pass
    # CUDA keeps the failure for the next kernel launch, which would raise it in an operation that has no part in it.
    with contextlib.suppress(RuntimeError):
        torch.empty(1, device="cuda").fill_(0)
    return False
