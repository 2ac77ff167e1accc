"""Checksums of files, and messages of system errors."""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from shardwise.errors import CheckpointError
from shardwise.units import format_size

try:  # ISA-L takes the processor's instructions for polynomials: 5 to 10 times as fast
    from isal.isal_zlib import crc32 as crc32
except ImportError:  # no wheel for this machine: the same numbers
    from zlib import crc32 as crc32

Natural = Annotated[int, Field(strict=True, ge=0, le=1 << 53)]
"""A number in a file; integers up to 2**53 are exact in every number type."""


@dataclass(frozen=True)
class FileFacts:
    """Size of a finished file, and CRC-32 of its header and of each tensor in the order of the file. With `block`, of
    format 1, they are of blocks of as many bytes. CRC-32 finds every burst of up to 32 wrong bits, and others but for
    one in 2**32.
    """

    size: Natural
    checksums: Annotated[tuple[Annotated[str, Field(pattern="^[0-9a-f]{8}$")], ...], Field(min_length=1)]
    block: Annotated[int, Field(strict=True, ge=1 << 10)] | None = None


def open_to_read(path: str) -> int:
    """Open a regular file, return its descriptor; refuse others, because reading a pipe would wait for ever."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path}: expected a file, found something else (a directory, a pipe or a device)")
    return descriptor


def in_words(error: BaseException) -> str:
    """Return the message of an exception; of a system error with file and errno."""
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        place = f"{error.filename}: " if error.filename else ""
        room = ""
        if error.errno == errno.ENOSPC and isinstance(error.filename, str):
            room = f"; {free_space(os.path.dirname(error.filename) or '.')}"
        return f"{place}{error.strerror} (errno {error.errno}){room}"
    return f"{type(error).__name__}: {error}"


def write_advice(error: OSError) -> str:
    """Return the fix for a file that cannot be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "Free space or choose another directory"
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return "Make the directory writable or choose another one"
    return "The disk or its file system has failed: look at the system's messages (dmesg), and choose another directory"


def free_space(path: str) -> str:
    """Describe the free space of a path's file system."""
    try:
        found = os.statvfs(path)
    except OSError as error:
        return f"the free space is not known ({error.strerror})"
    free = f"{format_size(found.f_bavail * found.f_frsize)} are free"
    if found.f_files and not found.f_favail:
        return f"{free}, and no inode is: no file can be made, however small, before others are removed"
    return free
