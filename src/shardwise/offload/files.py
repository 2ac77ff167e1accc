"""State on a disk: one file of a rank that has no name, and in it the places of values.

The file is gone with its process, however that ends. Its space is taken before anything is written, so that a disk that
is too small says so at the beginning.
"""

from __future__ import annotations

import os
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path

import torch

from shardwise.errors import OffloadError
from shardwise.offload.transfers import Threads, Transfer, Values
from shardwise.offload.unnamed import open_unnamed, padded, take_space


@dataclass(frozen=True)
class DiskOptions:
    """How a disk is used: the section `aio` of the configuration.

    Attributes:
        block_size: bytes of one request; brought up to a multiple of 4096. Memory that the disk does not take as it is
            (not from `aligned_bytes`, nor pinned) goes by way of buffers, of as many bytes for each request in flight.
            Of smaller ones many begin or end within a huge page of new memory, for which two requests wait then.
        queue_depth: requests in flight for each of `threads`.
        threads: `intra_op_parallelism`.
    """

    block_size: int = 4 << 20
    queue_depth: int = 8
    threads: int = 1

    @property
    def in_flight(self) -> int:
        """Requests that are with the disk at the same time, at most; each has a thread."""
        return self.queue_depth * self.threads


class SwapFile:
    """A file without a name in a directory, read and written by threads, past the page cache where that is possible.

    Values are written into an extent and read from it, in any order, by any number of transfers at the same time.
    Those of one extent are made one after the other: a read sees the write that was asked for before it.

    Args:
        directory: made if it is not there, for this user only.
        options: how it is read and written.
        label: whose file it is, for errors, as "rank 3's swap file".

    Attributes:
        directory: where it is.
        direct: whether the page cache is passed by. If not, the pages of what has been moved are given up at once.
        size: bytes of the file.

    Raises:
        OffloadError: no file can be made there.

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
        file = open_unnamed(directory, block)
        self.direct = file.direct
        self.size = 0
        self._descriptor = file.descriptor
        self._threads = Threads(file, block, options.in_flight, f"{label} in {directory}")
        self._free: list[tuple[int, int]] = []  # places and sizes, in order, no two side by side
        self._lock = threading.Lock()
        self._finalizer = weakref.finalize(self, self._threads.forget)
        self._finalizer.atexit = False

    @property
    def bytes_read(self) -> int:
        """Values that have been read."""
        return self._threads.bytes_read

    @property
    def bytes_written(self) -> int:
        """Values that have been written."""
        return self._threads.bytes_written

    @property
    def seconds(self) -> float:
        """Time in which at least one transfer was under way; bytes by it is the bandwidth."""
        return self._threads.seconds

    def reserve(self, size: int) -> Extent:
        """Take space for values, which the disk has from then on.

        Args:
            size: bytes of the values at most.

        Raises:
            OffloadError: the disk has too little space.
        """
        room = padded(size)
        with self._lock:
            if self._threads.closed:
                raise OffloadError(f"{self._threads.label}: it is closed")
            place = self._reuse(room)
            if place is None:
                place = self.size  # what is free lies before: space at the end is not kept
                take_space(self._descriptor, self.directory, place, place + room, self._threads.label)
                self.size = place + room
        return Extent(self, place, size)

    def read(self, extent: Extent, memory: torch.Tensor) -> Transfer:
        """Begin to read the values of an extent.

        Args:
            extent: of this file.
            memory: uint8, contiguous, on the host, as large as what was written last. What it holds is undefined until
                the transfer has ended well.

        Raises:
            OffloadError: the file is closed; everything else is told by `Transfer.wait`.
        """
        return self._begin(extent, memory, writes=False)

    def write(self, extent: Extent, memory: torch.Tensor) -> Transfer:
        """Begin to write values into an extent.

        Args:
            extent: of this file.
            memory: uint8, contiguous, on the host, no larger than the extent. It must not change until the transfer has
                ended.

        Raises:
            OffloadError: the file is closed; everything else is told by `Transfer.wait`.
        """
        return self._begin(extent, memory, writes=True)

    def close(self) -> None:
        """Give the space back; transfers that have not ended fail. No thread is left when this returns."""
        self._finalizer.detach()
        self._threads.close()

    def _begin(self, extent: Extent, memory: torch.Tensor, *, writes: bool) -> Transfer:
        if memory.device.type != "cpu" or memory.dtype != torch.uint8 or not memory.is_contiguous():
            raise ValueError(f"expected contiguous bytes of the host, found {memory.dtype} on {memory.device}")
        if memory.numel() > extent.size:
            raise ValueError(f"{memory.numel()} bytes for an extent of {extent.size}")
        if extent.freed:
            raise ValueError("the extent has been freed")
        return self._threads.begin(extent.values, memory.detach(), writes=writes)

    def _reuse(self, room: int) -> int | None:
        """Return a place that has been freed, one of just this size if there is one."""
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
        """Take note that a part is free; space at the end goes back to the disk."""
        with self._lock:
            if self._threads.closed or not room:
                return
            merged: list[tuple[int, int]] = []
            for start, size in sorted([*self._free, (place, room)]):
                if merged and sum(merged[-1]) == start:
                    start, size = merged[-1][0], merged.pop()[1] + size
                merged.append((start, size))
            if sum(merged[-1]) == self.size:
                self.size = merged.pop()[0]
                os.ftruncate(self._descriptor, self.size)
            self._free = merged


class Extent:
    """A part of a `SwapFile` that has been reserved; the file stays while there is one.

    Args:
        file: the file.
        place: in it.
        size: bytes that it has for values.

    Attributes:
        size: bytes that it has for values.
        offset: of the first one in the file.
        freed: whether it can be used no more.
    """

    def __init__(self, file: SwapFile, place: int, size: int) -> None:
        self._file = file
        self._room = padded(size)
        self.size = size
        self.offset = place
        self.values = Values(place)
        self.freed = False

    def free(self) -> None:
        """Give the space back, when what is on its way has ended; again does nothing."""
        if not self.freed:
            self.freed = True
            last = self.values.last
            if last is not None:
                last.settle()
            self._file.give_back(self.offset, self._room)
