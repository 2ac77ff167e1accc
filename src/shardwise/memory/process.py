"""Resident set size and address space of processes."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
from torch import nn

from shardwise.compat import without_overrides


def resident_bytes(process: int | None = None) -> int | None:
    """Return the resident bytes of a process (None: this one), or None if it has ended.

    >>> resident_bytes() > 0
    True
    """
    try:
        return _process(process or os.getpid()).memory_info().rss
    except psutil.Error:
        return None


def virtual_bytes() -> int:
    """Return the size of this process's address space."""
    return _process(os.getpid()).memory_info().vms


@functools.lru_cache(maxsize=1)
def _process(pid: int) -> psutil.Process:
    return psutil.Process(pid)


def peak_resident_bytes() -> int | None:
    """Return the peak resident bytes of this process since its start, or None if unknown."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None


def give_back_freed_memory() -> None:
    """Trim freed memory of the C library's heap (glibc), and empty torch's cache.

    glibc returns large blocks only above a threshold that grows with use (to 32 MiB), and otherwise only the end of its
    heap. So a model freed before its shards leaves resident holes. Trimming costs milliseconds, and later the first
    touch of those pages; call it at the end of construction, not in every step.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)
    if torch.cuda.is_initialized():
        # Otherwise activations would fragment the large blocks of the construction.
        torch.cuda.empty_cache()


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # another C library, or another system
        return None


def module_bytes(module: nn.Module, kind: str | None = None) -> int:
    """Return the bytes of a module's parameters and buffers on a device type (None: any); shared memory counts once."""
    storages = {}
    with without_overrides():  # without gathering resharded parameters
        for tensor in (*module.parameters(), *module.buffers()):
            counts = not tensor.is_meta and (kind is None or tensor.device.type == kind)
            if counts and tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                storages[id(storage)] = storage.nbytes()
    return sum(storages.values())
