"""Values on their way between memory and a file, in blocks that threads move side by side.

Whoever asks for a transfer goes on at once. Its blocks stand in a queue, from which each thread takes the next: so
as many requests are with the disk as there are threads. Where there is something to read and something to write, one
is taken after the other: most disks do both at once, in less time than one after the other takes. (Taken by all threads
together: if each took its own in turn, all would read at the same time, and then write.) A block that was written is
remembered by a sum over its bytes, which is compared when it is read.

Transfers of the same values are made one after the other, in the order in which they were asked for: a read sees the
write before it, a write does not overtake the read before it. The blocks of the later one come into the queue when the
earlier one has ended, so that no thread ever waits for another.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass, field
from queue import SimpleQueue

import numpy as np
import torch

from shardwise.errors import OffloadError
from shardwise.offload.unnamed import ALIGNMENT, Bytes, Unnamed, move_all, padded, paged


@dataclass(eq=False)
class Values:
    """What is known of the values in a part of a file.

    Attributes:
        place: of the first byte in the file.
        size: bytes that were written last; -1: none, or not all of them.
        sums: of each block of them.
        last: the transfer that was asked for last, while it has not ended.
    """

    place: int
    size: int = -1
    sums: list[int] = field(default_factory=list)
    last: Transfer | None = None


class Transfer:
    """Values on their way; made by `Threads.begin`. The memory must not change before the end."""

    def __init__(self, threads: Threads, values: Values, memory: torch.Tensor, writes: bool) -> None:
        self._label = threads.label
        self._ended = threading.Event()
        self._failure: tuple[str, BaseException | None] | None = None
        self.values = values
        self.writes = writes
        self._tensor: torch.Tensor | None = memory
        self.memory = bytes_of(memory)
        self.aligned = memory.data_ptr() % threads.file.memory_alignment == 0
        self.left = 0
        self.next: Transfer | None = None

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    @property
    def failed(self) -> bool:
        """Whether a part of it has failed."""
        return self._failure is not None

    def wait(self) -> None:
        """Block until it has ended; no thread reads or writes the memory then.

        Raises:
            OffloadError: a part of it has failed.
        """
        self._ended.wait()
        if self._failure is not None:
            text, cause = self._failure
            raise OffloadError(f"{self._label}: {text}. Check the disk, or name another one in nvme_path") from cause

    def settle(self) -> None:
        """Block until it has ended, well or not."""
        self._ended.wait()

    def fail(self, text: str, cause: BaseException | None = None) -> None:
        """Take note of a failure; the first one counts."""
        if self._failure is None:
            self._failure = text, cause

    def end(self) -> None:
        """Let go of the memory, and whoever waits."""
        self.memory, self._tensor = np.empty(0, np.uint8), None
        self._ended.set()


_Block = tuple[Transfer, int]


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """Return the memory of a tensor, which has to be kept; after `Tensor.numpy` it could not be given back."""
    if not tensor.numel():
        return np.empty(0, np.uint8)
    pointer = ctypes.cast(tensor.data_ptr(), ctypes.POINTER(ctypes.c_uint8))
    return np.ctypeslib.as_array(pointer, (tensor.numel(),))


class Threads:
    """The threads of one file. They start with the first transfer, and end when they are told to.

    They know nothing of whoever has the file, so that it can be forgotten while they are idle.

    Args:
        file: whose blocks they move; closed with the last thread.
        block: bytes of a block, a multiple of `ALIGNMENT`.
        count: how many requests are in flight at most.
        label: what errors call the file.

    Attributes:
        bytes_read, bytes_written: values of transfers that have ended well.
    """

    def __init__(self, file: Unnamed, block: int, count: int, label: str) -> None:
        self.file = file
        self.block = block
        self.label = label
        self.bytes_read = 0
        self.bytes_written = 0
        self._count = count
        self._lock = threading.Lock()
        self._queue: SimpleQueue[_End | None] = SimpleQueue()  # None: of one of the blocks
        self._blocks: tuple[deque[_Block], deque[_Block]] = deque(), deque()  # to be read, to be written
        self._wrote = True  # the block that was taken last was one to be written
        self._threads: list[threading.Thread] = []
        self._alive = 0
        self._closing = False  # blocks in the queue are let go
        self._under_way = 0
        self._since = 0.0
        self._seconds = 0.0

    @property
    def seconds(self) -> float:
        """Time in which at least one transfer was under way."""
        with self._lock:
            return self._seconds + (time.perf_counter() - self._since if self._under_way else 0.0)

    @property
    def closed(self) -> bool:
        """Whether no transfer can be asked for any more."""
        return self._closing

    def begin(self, values: Values, memory: torch.Tensor, *, writes: bool) -> Transfer:
        """Begin a transfer, or have it begin when the one before it of the same values has ended.

        Args:
            values: what is read or written.
            memory: uint8, contiguous, on the host.
            writes: whether values go to the file.

        Raises:
            OffloadError: the file is closed.
        """
        transfer = Transfer(self, values, memory, writes)
        with self._lock:
            if self._closing:
                raise OffloadError(f"{self.label}: it is closed")
            if not self._threads:
                bounce = paged(self._count * self.block)  # costs nothing until it is used
                self._threads = [
                    threading.Thread(target=self._work, args=(one,), name=f"shardwise-disk-{number}", daemon=True)
                    for number, one in enumerate(bounce.reshape(self._count, self.block))
                ]
                self._alive = self._count
                for thread in self._threads:
                    thread.start()
                _RUNNING.add(self)
            before, values.last = values.last, transfer
            if before is not None:
                before.next = transfer
            else:
                self._start(transfer)
        return transfer

    def forget(self) -> None:
        """Have the threads end soon, and the file be closed; transfers under way fail. Nothing is waited for.

        It takes no lock: it may be called wherever Python throws objects away.
        """
        if not self._closing:
            self._closing = True
            if self._threads:
                self._queue.put(_End(first=True))
            else:
                os.close(self.file.descriptor)

    def close(self) -> None:
        """End the threads and close the file, which is done when this returns; transfers under way fail."""
        with self._lock:
            self.forget()
        for thread in self._threads:
            thread.join()

    def _start(self, transfer: Transfer | None) -> None:
        """Put the blocks of a transfer into the queue; where there are none, end it and go on with the next one."""
        while transfer is not None:
            values, size = transfer.values, transfer.memory.size
            if not self._under_way:
                self._since = time.perf_counter()
            self._under_way += 1
            if self._closing:
                transfer.fail(_CLOSED)
            elif transfer.writes:
                values.size, values.sums = -1, [0] * -(-size // self.block)
            elif values.size != size:
                there = f"{values.size} bytes have been written"
                if values.size < 0:
                    there = "nothing has been written, or a write has failed"
                transfer.fail(f"{size} bytes are to be read at offset {values.place}, where {there}")
            transfer.left = 0 if transfer.failed else -(-size // self.block)
            for number in range(transfer.left):
                self._blocks[transfer.writes].append((transfer, number))
                self._queue.put(None)
            transfer = None if transfer.left else self._end(transfer)

    def _end(self, transfer: Transfer) -> Transfer | None:
        """End a transfer whose blocks have all been moved, or failed; return the one that comes after it."""
        values, size = transfer.values, transfer.memory.size
        if not transfer.failed:
            if transfer.writes:
                values.size = size
                self.bytes_written += size
            else:
                self.bytes_read += size
        self._under_way -= 1
        if not self._under_way:
            self._seconds += time.perf_counter() - self._since
        if values.last is transfer:
            values.last = None
        after, transfer.next = transfer.next, None
        transfer.end()
        return after

    def _work(self, bounce: Bytes) -> None:
        """Move one block after the other, with a buffer for those that the disk does not take as they are."""
        while True:
            found = self._queue.get()
            if found is None:
                transfer, number = self._next()
                self._take(transfer, number, bounce)
                del transfer  # while nothing is to be done, nothing is kept
            elif found.first:
                with self._lock:  # whoever was putting blocks into the queue has done so
                    for _ in self._threads:
                        self._queue.put(_End())
            else:
                break
        with self._lock:
            self._alive -= 1
            if not self._alive:
                os.close(self.file.descriptor)

    def _next(self) -> _Block:
        """Return the next block: one to be read after one to be written and so on, as long as there are both."""
        with self._lock:
            block = (self._blocks[not self._wrote] or self._blocks[self._wrote]).popleft()
            self._wrote = block[0].writes
        return block

    def _take(self, transfer: Transfer, number: int, bounce: Bytes) -> None:
        if self._closing:
            transfer.fail(_CLOSED)
        if not transfer.failed:
            try:
                self._move(transfer, number, bounce)
            except Exception as error:
                what = "writing" if transfer.writes else "reading"
                reason = (error.strerror or str(error)) if isinstance(error, OSError) else repr(error)
                transfer.fail(f"{what} {self._where(transfer, number)}: {reason}", error)
        with self._lock:
            transfer.left -= 1
            if not transfer.left:
                self._start(self._end(transfer))

    def _where(self, transfer: Transfer, number: int) -> str:
        start = number * self.block
        size = min(self.block, transfer.memory.size - start)
        return f"{size} bytes at offset {transfer.values.place + start}"

    def _move(self, transfer: Transfer, number: int, bounce: Bytes) -> None:
        """Read or write one block.

        Where the page cache is passed by, memory that the disk does not take, and the end of values, go by way of the
        buffer. numpy copies and adds up without holding other threads up, and without threads of its own.
        """
        start = number * self.block
        mine = transfer.memory[start : start + self.block]
        moved = mine
        if self.file.direct and not (transfer.aligned and mine.size % ALIGNMENT == 0):
            moved = bounce[: padded(mine.size)]
        values = transfer.values
        if transfer.writes:
            if moved is not mine:
                moved[: mine.size] = mine
                moved[mine.size :] = 0
            values.sums[number] = _sum(moved[: mine.size])
            count = move_all(os.pwritev, self.file.descriptor, moved, values.place + start)
        else:
            count = move_all(os.preadv, self.file.descriptor, moved, values.place + start)
        if not self.file.direct:
            # Begins to send to the disk what was written, and drops what has been read.
            os.posix_fadvise(self.file.descriptor, values.place + start, moved.size, os.POSIX_FADV_DONTNEED)
        if count < moved.size:
            what = "written" if transfer.writes else "read: the file ends there, it was cut short"
            transfer.fail(f"of {self._where(transfer, number)} only {count} were {what}")
        elif not transfer.writes:
            if _sum(moved[: mine.size]) != values.sums[number]:
                damaged = "are damaged: the disk has not given back what was written"
                transfer.fail(f"{self._where(transfer, number)} {damaged}")
            elif moved is not mine:
                mine[:] = moved[: mine.size]


_RUNNING: weakref.WeakSet[Threads] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """End all threads before Python ends: it would end them inside of numpy, which takes the process with it."""
    for threads in list(_RUNNING):
        threads.close()


@dataclass(frozen=True)
class _End:
    """Tells a thread to end; the first one has as many put behind all blocks as there are threads."""

    first: bool = False


_CLOSED = "it was closed before the transfer had ended"


def _sum(data: Bytes) -> int:
    """Return the sum of bytes taken as 64-bit numbers, without what goes beyond 64 bits."""
    whole = data.size - data.size % 8
    found = int(np.add.reduce(data[:whole].view(np.uint64)))
    return (found + int.from_bytes(data[whole:].tobytes(), "little")) % 2**64
