"""Sequential file writers, without torch (see `shardwise.checkpoint.checksums`); a finished file is on disk.

`CachedFile` writes through the page cache, and a thread flushes written bytes from the beginning. `DirectFile` writes
past it (O_DIRECT), through two small buffers: this takes half the processor time, keeps cached data of other programs,
and does not cache the file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

LARGE = 64 << 20
"""Files of at least this many bytes are flushed while they are written, not only at their end."""

_BUFFER = 4 << 20
"""Bytes of each buffer of a `DirectFile`; a multiple of every file system's block size."""

_WRITTEN_AT_ONCE = 1 << 20


class Output(Protocol):
    """A file that is being written."""

    def write(self, data: memoryview) -> None:
        """Append bytes; they may change after the return."""

    def finish(self) -> None:
        """Close the file; its bytes are on disk at return. Raises OSError if writing failed."""

    def abandon(self) -> None:
        """Close the file without finishing it; after `finish` this does nothing."""


def create(path: str, size: int, *, direct: bool = False, over: bool = False) -> Output:
    """Create a file of `size` bytes, new unless `over` (in place); large ones bypass the page cache with `direct`."""
    if direct and size >= LARGE and not over:
        return DirectFile(path)
    return CachedFile(path, size, over=over)


def open_over(path: str) -> int:
    """Open or create a file for overwriting, which reuses pages in memory; the caller truncates the rest."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)


class _Flusher(threading.Thread):
    def __init__(self, descriptor: int) -> None:
        super().__init__(name="shardwise-flush", daemon=True)
        self._descriptor = descriptor
        self._ended = threading.Event()
        self.error: OSError | None = None

    def run(self) -> None:
        while not self._ended.wait(0.05):
            try:
                os.fdatasync(self._descriptor)
            except OSError as error:
                # The system reports a failed write once, to the first caller.
                self.error = error
                return

    def end(self) -> None:
        self._ended.set()
        self.join()


class CachedFile:
    """A file written through the page cache; `path` must not exist, unless overwritten in place (`over`)."""

    def __init__(self, path: str, size: int, *, over: bool = False) -> None:
        opened, mode = (open_over(path), "wb") if over else (path, "xb")
        self._file = open(opened, mode, buffering=_WRITTEN_AT_ONCE)  # noqa: SIM115  (closed by finish() and abandon())
        self._size = size if over else None
        self._flusher = _Flusher(self._file.fileno()) if size >= LARGE else None
        if self._flusher is not None:
            self._flusher.start()

    def write(self, data: memoryview) -> None:
        """Append bytes; see `Output.write`."""
        self._file.write(data)

    def seek(self, place: int) -> None:
        """Continue writing at another byte."""
        self._file.seek(place)

    def finish(self) -> None:
        """Close the file; see `Output.finish`."""
        try:
            self._file.flush()
            if self._size is not None:
                os.ftruncate(self._file.fileno(), self._size)
            if self._flusher is not None:
                self._flusher.end()
                if self._flusher.error is not None:
                    raise self._flusher.error
            os.fsync(self._file.fileno())
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close the file without finishing it."""
        if self._flusher is not None:
            self._flusher.end()
        with contextlib.suppress(OSError):  # of buffered bytes, which are dropped
            self._file.close()


class DirectFile:
    """A new file written past the page cache if possible (`direct`), from one of two buffers by a thread."""

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        # Set on the open file, because open() may fail and leave a file.
        self.direct = self._pass_by(True)
        self._buffers = [mmap.mmap(-1, _BUFFER) for _ in range(2)]  # page-aligned, as O_DIRECT requires
        self._writes: list[Future[None] | None] = [None, None]
        self._current = 0
        self._filled = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shardwise-direct")

    def write(self, data: memoryview) -> None:
        """Append bytes; see `Output.write`."""
        start = 0
        while start < len(data):
            if not self._filled:
                self._await(self._current)
            count = min(len(data) - start, _BUFFER - self._filled)
            self._buffers[self._current][self._filled : self._filled + count] = data[start : start + count]
            self._filled += count
            start += count
            if self._filled == _BUFFER:
                whole = memoryview(self._buffers[self._current])
                self._writes[self._current] = self._thread.submit(self._put, whole)
                self._current, self._filled = 1 - self._current, 0

    def finish(self) -> None:
        """Close the file; see `Output.finish`."""
        try:
            # In order of submission, because the first failure is reported.
            for number in (self._current, 1 - self._current):
                self._await(number)
            if self._filled:
                # The last bytes are no multiple of the block size.
                self._pass_by(False)
                with memoryview(self._buffers[self._current]) as whole:
                    self._put(whole[: self._filled])
            os.fsync(self._descriptor)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close the file without finishing it."""
        self._thread.shutdown()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _await(self, number: int) -> None:
        write, self._writes[number] = self._writes[number], None
        if write is not None:
            write.result()

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
