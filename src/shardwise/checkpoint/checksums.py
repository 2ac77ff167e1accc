"""Checksums of blocks, and messages of system errors; without torch, because the writer process has none."""

from __future__ import annotations

import errno
import os
import stat
import zlib
from dataclasses import dataclass

from shardwise.checkpoint.file_writer import Output, create
from shardwise.errors import CheckpointError

BLOCK = 4 << 20
"""Bytes per checksum. CRC-32 finds every burst of up to 32 wrong bits in a block, and others but for one in 2**32."""

_STEP = 1 << 20
"""Bytes written and hashed at a time: few enough to stay in a cache between both."""


@dataclass(frozen=True)
class FileFacts:
    """Size of a finished file, and the CRC-32 of each of its blocks of `BLOCK` bytes."""

    size: int
    checksums: tuple[str, ...]


def open_to_read(path: str) -> int:
    """Open a regular file, return its descriptor; refuse others, because reading a pipe would wait for ever."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path}: expected a file, found something else (a directory, a pipe or a device)")
    return descriptor


class BlockSums:
    """CRC-32 of each block of a stream of bytes."""

    def __init__(self) -> None:
        self._sums: list[str] = []
        self._current = 0
        self._filled = 0
        self.size = 0

    def feed(self, data: memoryview) -> None:
        """Add the next bytes of the stream."""
        start = 0
        while start < len(data):
            stop = min(len(data), start + BLOCK - self._filled)
            self._current = zlib.crc32(data[start:stop], self._current)
            self._filled += stop - start
            if self._filled == BLOCK:
                self._close()
            start = stop
        self.size += len(data)

    def facts(self) -> FileFacts:
        """Return size and checksums of the stream; call it once, at the end."""
        if self._filled:
            self._close()
        return FileFacts(self.size, tuple(self._sums))

    def _close(self) -> None:
        self._sums.append(f"{self._current:08x}")
        self._current = self._filled = 0


def put(file: Output, sums: BlockSums | None, data: memoryview) -> None:
    """Append bytes to a file, and to its checksums if there are any. Raises OSError if writing fails."""
    for start in range(0, len(data), _STEP):
        piece = data[start : start + _STEP]
        file.write(piece)
        if sums is not None:
            sums.feed(piece)


def write_bytes(path: str, data: memoryview, *, direct: bool = False) -> FileFacts:
    """Write a new file with checksums, past the page cache if `direct` and possible, and flush it to disk."""
    sums = BlockSums()
    file = create(path, len(data), direct=direct)
    try:
        put(file, sums, data)
        file.finish()
    finally:
        file.abandon()
    return sums.facts()


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
    free = f"{found.f_bavail * found.f_frsize / 1e6:.1f} MB are free"
    if found.f_files and not found.f_favail:
        return f"{free}, and no inode is: no file can be made, however small, before others are removed"
    return free
