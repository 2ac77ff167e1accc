"""Bytes on their way to disk: blocks with checksums, and what went wrong, in words.

Nothing here needs torch, whose import takes seconds: the process that writes in the background starts without it.
"""

from __future__ import annotations

import os
import threading
import zlib
from dataclasses import dataclass

from shardwise.errors import CheckpointError

BLOCK = 4 << 20
"""Bytes that have one checksum. CRC-32 finds every burst of up to 32 wrong bits in a block, and others but for one
in 2**32."""

LARGE = 64 << 20
"""Files of at least this many bytes are sent to disk while they are being written, not only at their end."""


@dataclass(frozen=True)
class FileFacts:
    """What is known of a finished file: its size and the CRC-32 of each of its blocks of `BLOCK` bytes."""

    size: int
    checksums: tuple[str, ...]


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
        """Return size and checksums of what has been fed; call it once, at the end."""
        if self._filled:
            self._close()
        return FileFacts(self.size, tuple(self._sums))

    def _close(self) -> None:
        self._sums.append(f"{self._current:08x}")
        self._current = self._filled = 0


class Flusher(threading.Thread):
    """Sends what has been written of a file to disk, over and over, so that the disk works from the beginning."""

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


def write_bytes(path: str, data: memoryview) -> FileFacts:
    """Write a file with checksums; it is on disk when this returns.

    Args:
        path: file to create; it must not exist.
        data: what it shall hold.

    Raises:
        OSError: it cannot be created or written.
    """
    sums = BlockSums()
    with open(path, "xb", buffering=0) as file:
        flusher = Flusher(file.fileno()) if len(data) >= LARGE else None
        if flusher is not None:
            flusher.start()
        try:
            for start in range(0, len(data), BLOCK):
                piece = data[start : start + BLOCK]
                sums.feed(piece)
                done = 0
                while done < len(piece):
                    done += file.write(piece[done:])
        finally:
            if flusher is not None:
                flusher.end()
        if flusher is not None and flusher.error is not None:
            raise flusher.error
        os.fsync(file.fileno())
    return sums.facts()


def in_words(error: BaseException) -> str:
    """Return what an exception says, with the file and number of one of the system's."""
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        place = f"{error.filename}: " if error.filename else ""
        return f"{place}{error.strerror} (errno {error.errno})"
    return f"{type(error).__name__}: {error}"


def free_space(path: str) -> str:
    """Return how much may still be written to the file system of a path, in words."""
    try:
        found = os.statvfs(path)
    except OSError as error:
        return f"the free space is not known ({error.strerror})"
    return f"{found.f_bavail * found.f_frsize / 1e6:.1f} MB are free"
