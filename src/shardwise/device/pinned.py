"""Pinned (page-locked) host memory, which CUDA copies directly and asynchronously."""

from __future__ import annotations

import contextlib
from typing import Any

import torch


def pin(address: int, size: int) -> bool:
    """Pin mapped memory of this process (needs CUDA and a sufficient locked-memory limit); return True on success."""
    if not torch.cuda.is_available():
        return False
    return _succeeds(torch.cuda.cudart().cudaHostRegister, address, size, 0)


def unpin(address: int) -> None:
    """Unpin memory before it is unmapped."""
    _succeeds(torch.cuda.cudart().cudaHostUnregister, address)


def _succeeds(function: Any, *arguments: int) -> bool:
    try:
        if int(function(*arguments)) == 0:
            return True
    except RuntimeError:
        pass
    # CUDA keeps the error for the next kernel launch, which would raise it in an unrelated operation.
    with contextlib.suppress(RuntimeError):
        torch.empty(1, device="cuda").fill_(0)
    return False
