"""Temporary files (O_TMPFILE), which disappear with the process, and detection of direct I/O.

Direct I/O (O_DIRECT) runs at the disk's speed and does not evict other programs' pages from the page cache. It needs
aligned memory, offsets and sizes: every device accepts `ALIGNMENT`; many accept less for memory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from shutil import disk_usage
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardwise.device.hostmemory import HUGE, mapped
from shardwise.errors import OffloadError

ALIGNMENT = 4096
"""Alignment of offsets and sizes in files; no device needs more."""

_MEMORY_ALIGNMENTS = (64, 512)
"""Smaller memory alignments, tried in this order; torch's allocations have the first."""

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NOT_TAKEN = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}
"""Errors of file systems that cannot preallocate space."""

Bytes = npt.NDArray[np.uint8]


class TmpFile(NamedTuple):
    """Open temporary file (closed by its owner). `direct`: I/O bypasses the page cache, and needs this alignment."""

    descriptor: int
    direct: bool
    memory_alignment: int


def paged(size: int) -> Bytes:
    """Return page-aligned zeroed memory, which returns to the system when the last reference ends.

    Large memory is aligned to huge pages: a disk receives one page at a time, and scattered pages halve its speed.
    """
    large = size >= HUGE
    found: Bytes = mapped(max(1, size + HUGE * large)).numpy()
    first = -found.ctypes.data % HUGE if large else 0
    return found[first : first + size]


def padded(size: int) -> int:
    """Round a size or an offset up to a multiple of `ALIGNMENT`."""
    return size + -size % ALIGNMENT


def open_tmpfile(directory: Path, block: int) -> TmpFile:
    """Open a temporary file in a directory (created for this user only), and test direct I/O with `block` bytes.

    Raises OffloadError if the directory or the file cannot be created.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            descriptor = os.dup(file.fileno())
    except OSError as error:
        raise OffloadError(
            f"{directory}: no file for state can be made there: {error.strerror}. Give a directory on a local disk "
            "that this user can write to (zero_optimization.offload_optimizer.nvme_path, or that of offload_param)."
        ) from error
    alignment = _try(descriptor, block)
    return TmpFile(descriptor, alignment > 0, alignment or 1)


def _try(descriptor: int, block: int) -> int:
    """Enable direct I/O if it works; return the required memory alignment, or 0.

    File systems may accept the flag and refuse transfers. The alignment depends on device and size. Both are tested.
    """
    if not _pass_by(descriptor, True):
        return 0
    sent, back = paged(2 * block), paged(2 * block)
    sent[:] = np.arange(2 * block, dtype=np.uint8)
    found = 0
    for alignment in (*_MEMORY_ALIGNMENTS, ALIGNMENT):
        with contextlib.suppress(OSError):
            # Memory aligned to this value and to no larger one.
            there = slice(alignment % ALIGNMENT, alignment % ALIGNMENT + block)
            move_all(os.pwritev, descriptor, sent[there], 0)
            move_all(os.preadv, descriptor, back[there], 0)
            if np.array_equal(sent[there], back[there]):
                found = alignment
                break
    os.ftruncate(descriptor, 0)
    if not found:
        _pass_by(descriptor, False)
    return found


def _pass_by(descriptor: int, wanted: bool) -> bool:
    """Enable or disable direct I/O; return True if the file system agrees."""
    flag = getattr(os, "O_DIRECT", 0)
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | flag if wanted else flags & ~flag)
    except OSError:
        return False
    return flag != 0


def take_space(descriptor: int, directory: Path, before: int, end: int, label: str) -> None:
    """Extend a file from `before` to `end` bytes of allocated disk space. On failure the file stays unchanged.

    Raises OffloadError if the disk has too little space.
    """
    try:
        try:
            if end > before:
                os.posix_fallocate(descriptor, before, end - before)
        except OSError as error:
            if error.errno not in _NOT_TAKEN:
                raise
            # Fallback without preallocation.
            if disk_usage(directory).free < end - before:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
            os.ftruncate(descriptor, end)
    except OSError as error:
        os.ftruncate(descriptor, before)
        message = f"{label}: no space could be taken: {error.strerror}"
        if error.errno not in _FULL:
            raise OffloadError(message) from error
        raise OffloadError(
            f"{message}. {end - before} bytes more are needed, {disk_usage(directory).free} bytes are free. "
            'Give an nvme_path on another disk, or leave the state in the memory of the host with "device": "cpu"',
        ) from error


def move_all(call: Callable[[int, list[Any], int], int], descriptor: int, memory: Bytes, place: int) -> int:
    """Read (`os.preadv`) or write (`os.pwritev`) all of contiguous memory, in as many system calls as needed.

    Returns the number of bytes, fewer only at the end of a file. The calls release the GIL, and raise OSError.
    """
    done = 0
    while done < memory.size:
        count = call(descriptor, [memory[done:]], place + done)
        if not count:
            break
        done += count
    return done
