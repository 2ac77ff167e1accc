"""Files without a name, which are gone with the process, and what the disk below them can do.

Past the page cache (O_DIRECT) a disk moves values at its own speed, and nothing that other programs need is driven out
of the memory of the host. It demands that memory, places and sizes are multiples of something: of `ALIGNMENT` all are
taken; many devices take memory that begins at less.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from shardwise.errors import OffloadError

ALIGNMENT = 4096
"""Places and sizes in files are multiples of it: no device demands more."""

_MEMORY_ALIGNMENTS = (64, 512)
"""What may be enough for memory, tried in this order; torch's own begins at multiples of the first."""

_NO_UNNAMED = {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT}
"""How file systems and old kernels say that they have no files without a name."""

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NOT_TAKEN = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}
"""How file systems say that they cannot take space beforehand."""

_HUGE_PAGE = 2 << 20

Bytes = npt.NDArray[np.uint8]


class Unnamed(NamedTuple):
    """An open file without a name.

    Attributes:
        descriptor: of the file; empty, to be closed by whoever has it.
        direct: whether the page cache is passed by.
        memory_alignment: what addresses of memory must be multiples of; 1 if the page cache is not passed by.
    """

    descriptor: int
    direct: bool
    memory_alignment: int


def paged(size: int) -> Bytes:
    """Return memory that begins with a page, of zeros; it goes back to the system as soon as nobody has it.

    Large memory lies in huge pages if there are any: a disk is given one of them at a time, and pages that are
    scattered over the memory of the host cost half of its speed.
    """
    large = size >= _HUGE_PAGE
    memory = mmap.mmap(-1, max(1, size + _HUGE_PAGE * large), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    found = np.frombuffer(memory, np.uint8)
    if not large:
        return found[:size]
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    first = -found.ctypes.data % _HUGE_PAGE
    return found[first : first + size]


def aligned_bytes(size: int) -> torch.Tensor:
    """Return memory of the host that is read and written directly on every disk, of zeros.

    Example:
        >>> aligned_bytes(10).data_ptr() % ALIGNMENT
        0
    """
    return torch.from_numpy(paged(size))


def padded(size: int) -> int:
    """Return a size or a place, brought up to the next multiple of `ALIGNMENT`."""
    return size + -size % ALIGNMENT


def bytes_free(directory: Path) -> int:
    """Return how many bytes the disk of a directory has for this user."""
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


def open_unnamed(directory: Path, block: int) -> Unnamed:
    """Open a file in a directory that no name leads to, and find out what its disk can do.

    Args:
        directory: made if it is not there, for this user only.
        block: bytes of the transfers to come, a multiple of `ALIGNMENT`: the disk is tried with this size.

    Raises:
        OffloadError: the directory cannot be made, or no file in it.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = _open(directory)
    except OSError as error:
        raise OffloadError(
            f"{directory}: no file for state can be made there: {error.strerror}. Give a directory on a local disk "
            "that this user can write to (zero_optimization.offload_optimizer.nvme_path, or that of offload_param)."
        ) from error
    alignment = _try(descriptor, block)
    return Unnamed(descriptor, alignment > 0, alignment or 1)


def _open(directory: Path) -> int:
    """Open a file that only this user can read, and that has no name when this returns."""
    if hasattr(os, "O_TMPFILE"):
        try:
            return os.open(directory, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno not in _NO_UNNAMED:
                raise
    descriptor, name = tempfile.mkstemp(prefix=".shardwise-", dir=directory)
    os.unlink(name)
    return descriptor


def _try(descriptor: int, block: int) -> int:
    """Pass the page cache by if that works; return what memory must be aligned to then, or 0.

    File systems that say yes to the flag may still refuse every transfer, and what memory is taken depends on the
    device and the size: only transfers tell.
    """
    if not _pass_by(descriptor, True):
        return 0
    sent, back = paged(2 * block), paged(2 * block)
    sent[:] = np.arange(2 * block, dtype=np.uint8)
    found = 0
    for alignment in (*_MEMORY_ALIGNMENTS, ALIGNMENT):
        with contextlib.suppress(OSError):
            # Memory that is a multiple of this one, and of no larger one.
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
    """Pass the page cache by from now on, or no more; return whether the file system has agreed."""
    flag = getattr(os, "O_DIRECT", 0)
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | flag if wanted else flags & ~flag)
    except OSError:
        return False
    return flag != 0


def take_space(descriptor: int, directory: Path, before: int, end: int, label: str) -> None:
    """Make a file larger, with space that the disk really has; if it has not enough, the file stays as it was.

    Args:
        descriptor: of the file.
        directory: where it is.
        before: bytes that it has.
        end: bytes that it will have.
        label: what errors call it.

    Raises:
        OffloadError: the disk has too little space, or cannot say.
    """
    try:
        try:
            if end > before:
                os.posix_fallocate(descriptor, before, end - before)
        except OSError as error:
            if error.errno not in _NOT_TAKEN:
                raise
            # Then this is all that can be done beforehand.
            if bytes_free(directory) < end - before:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
            os.ftruncate(descriptor, end)
    except OSError as error:
        os.ftruncate(descriptor, before)
        said = f"{label}: no space could be taken: {error.strerror}"
        if error.errno not in _FULL:
            raise OffloadError(said) from error
        raise OffloadError(
            f"{said}. {end - before} bytes more are needed, {bytes_free(directory)} bytes are free. "
            'Give an nvme_path on another disk, or leave the state in the memory of the host with "device": "cpu"',
        ) from error


def move_all(call: Callable[[int, list[Any], int], int], descriptor: int, memory: Bytes, place: int) -> int:
    """Read or write all of some memory, in as many calls as the system needs.

    Args:
        call: `os.preadv` or `os.pwritev`; both let other threads go on.
        descriptor: of the file.
        memory: contiguous.
        place: in the file.

    Returns:
        How many bytes were moved; fewer than there are only where a file ends.

    Raises:
        OSError: of the system.
    """
    done = 0
    while done < memory.size:
        count = call(descriptor, [memory[done:]], place + done)
        if not count:
            break
        done += count
    return done
