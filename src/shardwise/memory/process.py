"""Resident set size: what the operating system says the process uses, read from /proc (Linux) or not at all."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from shardwise.compat import without_overrides


def resident_bytes(process: int | None = None) -> int | None:
    """Return the bytes of a process that are in memory now, or None where the system has no /proc, or no such process.

    Args:
        process: its number; None: this one.

    >>> size = resident_bytes()
    >>> size is None or size > 0
    True
    """
    return _pages(1, process)


def virtual_bytes() -> int | None:
    """Return the size of this process's address space, or None where the system has no /proc."""
    return _pages(0)


def _pages(field: int, process: int | None = None) -> int | None:
    try:
        fields = Path(f"/proc/{process or 'self'}/statm").read_text().split()
    except OSError:
        return None
    return int(fields[field]) * os.sysconf("SC_PAGE_SIZE")


def peak_resident_bytes() -> int | None:
    """Return the most bytes of this process that were in memory at once since it started, or None if unknown."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None


def give_back_freed_memory() -> None:
    """Have the C library return memory that was freed between blocks still in use (glibc), and torch what it caches.

    glibc returns large blocks only above a threshold that grows with use (to 32 MiB), and otherwise what lies at the
    end of its heap. What dies before its neighbours, such as a whole model whose shards outlive it, leaves holes that
    stay resident. This costs milliseconds and the first touch of those pages later: it is for turning points such as
    the end of construction, not for every step.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)
    if torch.cuda.is_initialized():
        # What construction has taken in large pieces would be cut up by the activations to come.
        torch.cuda.empty_cache()


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # another C library, or another system
        return None


def module_bytes(module: nn.Module, kind: str | None = None) -> int:
    """Return the bytes of memory behind a module's parameters and buffers; shared memory counts once.

    Args:
        module: any.
        kind: what lies on devices of this type; None: on any.
    """
    storages = {}
    with without_overrides():  # released parameters need not come back for this
        for tensor in (*module.parameters(), *module.buffers()):
            counts = not tensor.is_meta and (kind is None or tensor.device.type == kind)
            if counts and tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                storages[id(storage)] = storage.nbytes()
    return sum(storages.values())
