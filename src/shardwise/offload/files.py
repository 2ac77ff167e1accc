"""Swap file: one temporary file of a rank, with extents for values, which disappears with its process.

Space is reserved before any write: a too small disk fails early.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from shardwise.errors import OffloadError
from shardwise.offload.tmpfile import open_tmpfile, padded, take_space
from shardwise.offload.transfers import Threads, Transfer, Values


@dataclass(frozen=True)
class DiskOptions:
    """Disk options: section `aio` of the configuration.

    Attributes:
        block_size: bytes of one request, rounded up to a multiple of 4096. Memory unsuitable for direct I/O (neither
            from `paged` nor pinned) is copied through as large a buffer for each request in flight. Smaller
            blocks often split a huge page of new memory, for which two requests then wait.
        queue_depth: requests in flight for each of `threads`.
        threads: `intra_op_parallelism`.
    """

    block_size: int = 4 << 20
    queue_depth: int = 8
    threads: int = 1

    @property
    def in_flight(self) -> int:
        """Maximum number of concurrent requests; each has a thread."""
        return self.queue_depth * self.threads


class SwapFile:
    """Temporary file in a directory (created for this user only), read and written by threads.

    Any number of transfers may be concurrent, in any order of extents. Transfers of one extent are serialized: a read
    sees the write requested before it. `label` names the file in errors. `direct`: I/O bypasses the page cache;
    otherwise transferred pages are dropped at once. Raises OffloadError if the file cannot be created.

    Example:
        >>> import tempfile
        >>> file = SwapFile(Path(tempfile.mkdtemp()), DiskOptions(), label="an example's file")
        >>> extent = file.reserve(4)
        >>> file.write(extent, torch.tensor([1, 2, 3, 4], dtype=torch.uint8)).wait()
        >>> back = torch.empty(4, dtype=torch.uint8)
        >>> file.read(extent, back).wait()
        >>> back.tolist()
        [1, 2, 3, 4]
        >>> file.close()
    """

    def __init__(self, directory: Path, options: DiskOptions, *, label: str) -> None:
        self.directory = directory
        block = padded(options.block_size)
        file = open_tmpfile(directory, block)
        self.direct = file.direct
        self.size = 0
        self.threads = Threads(file, block, options.in_flight, f"{label} in {directory}")
        self._free: list[tuple[int, int]] = []  # (offset, size), sorted, never adjacent
        self._lock = threading.Lock()
        self._finalizer = weakref.finalize(self, self.threads.forget)
        self._finalizer.atexit = False

    def reserve(self, size: int) -> Extent:
        """Allocate disk space for at most `size` bytes of values. Raises OffloadError if the disk has too little."""
        room = padded(size)
        with self._lock:
            if self.threads.closed:
                raise OffloadError(f"{self.threads.label}: it is closed")
            place = self._reuse(room)
            if place is None:
                place = self.size  # free extents are before the end: free space at the end is truncated
                take_space(self.threads.file.descriptor, self.directory, place, place + room, self.threads.label)
                self.size = place + room
        return Extent(self, place, size)

    def read(self, extent: Extent, memory: torch.Tensor, ready: Callable[[], None] | None = None) -> Transfer:
        """Start a read of an extent into memory as large as the last write: uint8, contiguous, on the host.

        A thread calls `ready`, which blocks it until the memory may change. The content is undefined until the transfer
        has succeeded. Raises OffloadError if the file is closed; `Transfer.wait` raises other errors.
        """
        return self._begin(extent, memory, writes=False, ready=ready)

    def write(self, extent: Extent, memory: torch.Tensor, ready: Callable[[], None] | None = None) -> Transfer:
        """Start a write of memory (uint8, contiguous, on the host, no larger than the extent) into an extent.

        The memory must not change until the transfer has ended. A thread calls `ready`, which blocks it until the
        memory has the values. Errors as of `read`.
        """
        return self._begin(extent, memory, writes=True, ready=ready)

    def close(self) -> None:
        """Release the space and stop all threads; pending transfers fail."""
        self._finalizer.detach()
        self.threads.close()

    def _begin(
        self, extent: Extent, memory: torch.Tensor, *, writes: bool, ready: Callable[[], None] | None = None
    ) -> Transfer:
        if memory.device.type != "cpu" or memory.dtype != torch.uint8 or not memory.is_contiguous():
            raise ValueError(f"expected contiguous bytes of the host, found {memory.dtype} on {memory.device}")
        if memory.numel() > extent.size:
            raise ValueError(f"{memory.numel()} bytes for an extent of {extent.size}")
        if extent.freed:
            raise ValueError("the extent has been freed")
        return self.threads.begin(extent.values, memory.detach(), writes=writes, ready=ready)

    def _reuse(self, room: int) -> int | None:
        if not room:
            return 0
        fits = [number for number, (_, free) in enumerate(self._free) if free >= room]
        if not fits:
            return None
        number = next((number for number in fits if self._free[number][1] == room), fits[0])
        place, free = self._free[number]
        self._free[number : number + 1] = [(place + room, free - room)] if free > room else []
        return place

    def give_back(self, place: int, room: int) -> None:
        """Mark an extent as free; free space at the end returns to the disk."""
        with self._lock:
            if self.threads.closed or not room:
                return
            merged: list[tuple[int, int]] = []
            for start, size in sorted([*self._free, (place, room)]):
                if merged and sum(merged[-1]) == start:
                    start, size = merged[-1][0], merged.pop()[1] + size
                merged.append((start, size))
            if sum(merged[-1]) == self.size:
                self.size = merged.pop()[0]
                os.ftruncate(self.threads.file.descriptor, self.size)
            self._free = merged


class Extent:
    """A reserved part of a `SwapFile` from byte `offset` on, which keeps the file alive."""

    def __init__(self, file: SwapFile, place: int, size: int) -> None:
        self._file = file
        self._room = padded(size)
        self.size = size
        self.offset = place
        self.values = Values(place)
        self.freed = False

    def free(self) -> None:
        """Release the space after pending transfers; a second call does nothing."""
        if not self.freed:
            self.freed = True
            last = self.values.last
            if last is not None:
                last.settle()
            self._file.give_back(self.offset, self._room)
