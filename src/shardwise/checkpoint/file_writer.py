"""Files that are written from beginning to end and are on disk when they are finished.

    CachedFile    through the page cache; a thread sends to disk what has been written, so that the disk works from the
                  beginning
    DirectFile    past the page cache (O_DIRECT), through two small buffers: half the processor time, and nothing that
                  other programs have read is driven out of memory; but the file is not in memory either

Nothing here needs torch; see `shardwise.checkpoint.checksums`.
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
"""Files of at least this many bytes are sent to disk while they are being written, not only at their end."""

_BUFFER = 4 << 20
"""Bytes of each buffer of a `DirectFile`; a multiple of whatever file systems demand."""

_WRITTEN_AT_ONCE = 1 << 20
"""Bytes that Python's own file object collects before it calls the system."""


class Output(Protocol):
    """A file that is being written."""

    def write(self, data: memoryview) -> None:
        """Append bytes; they may change as soon as this returns.

        Raises:
            OSError: something could not be written, now or earlier.
        """

    def finish(self) -> None:
        """Close the file; it is on disk when this returns.

        Raises:
            OSError: something could not be written.
        """

    def abandon(self) -> None:
        """Close the file without finishing it; after `finish` this does nothing."""


def create(path: str, size: int, *, direct: bool = False, over: bool = False) -> Output:
    """Create a file.

    Args:
        path: it must not exist.
        size: bytes that it will have.
        direct: write past the page cache if the file system can do that and the file is large enough for it to matter.
        over: it may exist, and is written over in its place.

    Raises:
        OSError: it cannot be created.
    """
    if direct and size >= LARGE and not over:
        return DirectFile(path)
    return CachedFile(path, size, over=over)


def open_over(path: str) -> int:
    """Open a file to be written over, or create it; return its descriptor.

    The memory that it already has in a memory file system stays: taking pages and clearing them is most of what writing
    there costs. Whoever has written it has to cut off what is left behind the end.
    """
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)


class _Flusher(threading.Thread):
    """Sends what has been written of a file to disk, over and over."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(name="shardwise-flush", daemon=True)
        self._descriptor = descriptor
        self._ended = threading.Event()
        self.error: OSError | None = None

    def run(self) -> None:
        """Flush until told to end."""
        while not self._ended.wait(0.05):
            try:
                os.fdatasync(self._descriptor)
            except OSError as error:
                # The system tells of a failed write once, to whoever asks first.
                self.error = error
                return

    def end(self) -> None:
        """Stop flushing; the thread is gone when this returns."""
        self._ended.set()
        self.join()


class CachedFile:
    """A file that is written through the page cache.

    Args:
        path: file to create; it must not exist.
        size: bytes that it will have.
        over: it may exist, and is written over in its place.
    """

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
        """Go on writing at another byte."""
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
        with contextlib.suppress(OSError):  # of bytes still buffered, which nobody wants any more
            self._file.close()


class DirectFile:
    """A file that is written past the page cache, where the file system allows it, and else through it.

    One buffer is filled while a thread writes the other.

    Args:
        path: file to create; it must not exist.

    Attributes:
        direct: whether the page cache is passed by.
    """

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        # Told to the open file, not to open(): that may fail and leave a file all the same.
        self.direct = self._pass_by(True)
        self._buffers = [mmap.mmap(-1, _BUFFER) for _ in range(2)]  # page-aligned, which the system demands
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
            # In the order in which they were handed over: the first failure is the one to tell.
            for number in (self._current, 1 - self._current):
                self._await(number)
            if self._filled:
                # The end of a file is no multiple of what direct writes must be multiples of.
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
                # Not in such steps, or not at all: some file systems say so only now.
                if error.errno != errno.EINVAL or not self.direct:
                    raise
                self.direct = self._pass_by(False)

    def _pass_by(self, wanted: bool) -> bool:
        """Pass the page cache by from now on, or no more; return whether that is so."""
        flag = getattr(os, "O_DIRECT", 0)
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | flag if wanted else flags & ~flag)
        except OSError:
            return False
        return wanted and flag != 0
