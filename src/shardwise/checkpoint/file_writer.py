"""A file that is written in order, through the page cache or past it (O_DIRECT).

Large files written past the page cache do not wait for the dirty pages of other programs, and leave their cached data
in memory. A load on the same machine then reads from the disk.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os

LARGE = 64 << 20
"""Bytes of the smallest file that is written past the page cache."""

_BUFFER = 8 << 20
"""Bytes of one direct write; a multiple of every file system's block size."""


class FileWriter:
    """A file of `size` bytes, new unless `over` (in place), written past the page cache with `direct` if possible."""

    def __init__(self, path: str, size: int, *, direct: bool = False, over: bool = False) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (0 if over else os.O_EXCL)
        self._descriptor = os.open(path, flags, 0o666)
        self._size = size
        self._filled = 0
        # Set on the open file, because open() may fail and leave a file.
        self.direct = direct and size >= LARGE and not over and self._pass_by(True)
        self._buffer = mmap.mmap(-1, _BUFFER) if self.direct else None  # page-aligned, as O_DIRECT requires

    def write(self, data: memoryview) -> None:
        """Append bytes; they may change after the return."""
        if self._buffer is None:
            self._put(data)
            return
        start = 0
        while start < len(data):
            count = min(len(data) - start, _BUFFER - self._filled)
            self._buffer[self._filled : self._filled + count] = data[start : start + count]
            self._filled += count
            start += count
            if self._filled == _BUFFER:
                self._put(memoryview(self._buffer))
                self._filled = 0

    def seek(self, place: int) -> None:
        """Continue writing at another byte, if not `direct`."""
        os.lseek(self._descriptor, place, os.SEEK_SET)

    def finish(self) -> None:
        """Close the file; its bytes are on disk at return. Raises OSError if writing failed."""
        if self._buffer is not None and self._filled:
            self._pass_by(False)  # the last bytes are no multiple of the block size
            self._put(memoryview(self._buffer)[: self._filled])
        os.ftruncate(self._descriptor, self._size)
        os.fsync(self._descriptor)
        self.abandon()

    def abandon(self) -> None:
        """Close the file without finishing it."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def _put(self, data: memoryview) -> None:
        done = 0
        while done < len(data):
            try:
                done += os.write(self._descriptor, data[done:])
            except OSError as error:
                # Some file systems refuse direct writes, or this block size, only now.
                if error.errno != errno.EINVAL or not self.direct:
                    raise
                self.direct = self._pass_by(False)

    def _pass_by(self, wanted: bool) -> bool:
        flag = getattr(os, "O_DIRECT", 0)
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | flag if wanted else flags & ~flag)
        except OSError:
            return False
        return wanted and flag != 0
