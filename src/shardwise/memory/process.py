"""Resident set size: what the operating system says the process uses, read from /proc (Linux) or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn


def resident_bytes() -> int | None:
    """Return the bytes of this process that are in memory now, or None where the system has no /proc.

    >>> size = resident_bytes()
    >>> size is None or size > 0
    True
    """
    try:
        fields = Path("/proc/self/statm").read_text().split()
    except OSError:
        return None
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


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


def module_bytes(module: nn.Module) -> int:
    """Return the bytes of memory behind a module's parameters and buffers; shared memory counts once."""
    storages = {}
    with torch._C.DisableTorchFunctionSubclass():  # released parameters need not come back for this
        for tensor in (*module.parameters(), *module.buffers()):
            if not tensor.is_meta and tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                storages[id(storage)] = storage.nbytes()
    return sum(storages.values())
