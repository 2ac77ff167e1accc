"""Read the memory of other processes on this machine: process_vm_readv of Linux ("cross memory attach").

The kernel copies straight from one process to the other, without a buffer between them and without the other's help.
It allows this to a process that might debug the other: same user, and no stricter rule of the machine. One such rule,
Yama's `ptrace_scope` 1, allows debugging by the process's ancestors only, unless it names somebody; then each process
names its parent, usually the launcher, whose descendants may then read each other.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_DESCENDANTS_ONLY = 1
_RANGES = 1024
"""Ranges in one call (IOV_MAX of Linux)."""
_PR_SET_PTRACER = 0x59616D61


class _Range(ctypes.Structure):
    """struct iovec."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


@functools.cache
def _function() -> Any:
    """Return the C library's process_vm_readv, or None where there is none."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        function = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except (OSError, AttributeError):
        return None
    ranges = ctypes.POINTER(_Range)
    function.argtypes = (ctypes.c_int, ranges, ctypes.c_ulong, ranges, ctypes.c_ulong, ctypes.c_ulong)
    function.restype = ctypes.c_ssize_t
    return function


def supported() -> bool:
    """Whether this system has the call; whether it allows it, only trying can tell."""
    return _function() is not None


def allow_siblings() -> None:
    """Let the descendants of this process's parent read this process's memory, where the machine needs to be told."""
    with contextlib.suppress(OSError, ValueError):
        if int(_YAMA.read_text()) == _DESCENDANTS_ONLY:
            ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0)


def read(process: int, address: int, into: int, size: int) -> None:
    """Copy memory of another process into this one's.

    Args:
        process: its number.
        address: where it begins there.
        into: where it shall begin here.
        size: bytes.

    Raises:
        OSError: the process has gone, does not allow it, or has no memory there.

    Example:
        >>> source, target = torch.arange(4.0), torch.zeros(4)
        >>> if supported():
        ...     read(os.getpid(), source.data_ptr(), target.data_ptr(), source.nbytes)
        ... else:
        ...     _ = target.copy_(source)
        >>> target.tolist()
        [0.0, 1.0, 2.0, 3.0]
    """
    function = _function()
    done = 0
    while done < size:
        here, there = _Range(into + done, size - done), _Range(address + done, size - done)
        copied = function(process, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if copied <= 0:
            code = ctypes.get_errno()
            raise OSError(code, f"reading {size} bytes of process {process}: {os.strerror(code)}")
        done += copied


def read_tensor(process: int, address: int, into: torch.Tensor) -> None:
    """Fill a contiguous CPU tensor from another process's memory; see `read`."""
    read(process, address, into.data_ptr(), into.nbytes)


def read_ranges(process: int, ranges: Sequence[tuple[int, int, int]]) -> None:
    """Copy several ranges of another process's memory with as few calls as possible.

    Args:
        process: its number.
        ranges: of each where it begins there, where it shall begin here, and its bytes.

    Raises:
        OSError: as of `read`.
    """
    if len(ranges) > 1:
        for first in range(0, len(ranges), _RANGES):
            some = ranges[first : first + _RANGES]
            here = (_Range * len(some))(*(_Range(into, size) for _, into, size in some))
            there = (_Range * len(some))(*(_Range(address, size) for address, _, size in some))
            if _function()(process, here, len(some), there, len(some), 0) != sum(size for _, _, size in some):
                break  # what is wrong, and with which, the single calls will tell
        else:
            return
    for address, into, size in ranges:
        read(process, address, into, size)
