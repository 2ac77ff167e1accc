"""Transfers between memory and a file, in blocks that threads move concurrently.

Blocks of a transfer enter a queue; each thread takes the next block, hence as many requests are in flight as there are
threads. Reads and writes alternate, because most disks do both at once in less time than one after the other. (With one
alternation for each thread, all would read together and then write together.) Each written block has a checksum, which
is compared on reading.

Transfers of the same values run in request order: a read sees the write before it, a write waits for the read before
it. Blocks of the later transfer enter the queue when the earlier one has ended: no thread waits for another.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue

import numpy as np
import torch

from shardwise.errors import OffloadError
from shardwise.offload.tmpfile import ALIGNMENT, Bytes, TmpFile, move_all, padded, paged


@dataclass(eq=False)
class Values:
    """Values in a file. `size`: bytes of the last write, or -1; `sums`: block checksums; `last`: pending transfer."""

    place: int
    size: int = -1
    sums: list[int] = field(default_factory=list)
    last: Transfer | None = None


class Transfer:
    """A pending transfer, created by `Threads.begin`. Its memory must not change before the end, or before `ready`."""

    def __init__(
        self, threads: Threads, values: Values, memory: torch.Tensor, writes: bool, ready: Callable[[], None] | None
    ) -> None:
        self._label = threads.label
        self._ended = threading.Event()
        self.failure: tuple[str, BaseException | None] | None = None
        """Text and cause of the first failure of a block."""
        self.values = values
        self.writes = writes
        self._tensor: torch.Tensor | None = memory
        self.memory = bytes_of(memory)
        self.aligned = memory.data_ptr() % threads.file.memory_alignment == 0
        self.ready = ready
        """Blocks a thread until the memory has the values to write, or may be read into; None: it does at once."""
        self.left = 0
        self.next: Transfer | None = None

    @property
    def done(self) -> bool:
        """True if the transfer has ended, with or without error."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Wait for the end of the transfer; afterwards no thread uses the memory. Raises OffloadError if it failed."""
        self._ended.wait()
        if self.failure is not None:
            text, cause = self.failure
            raise OffloadError(f"{self._label}: {text}. Check the disk, or name another one in nvme_path") from cause

    def settle(self) -> None:
        """Wait for the end of the transfer, ignoring errors."""
        self._ended.wait()

    def fail(self, text: str, cause: BaseException | None = None) -> None:
        """Record a failure; the first one counts."""
        if self.failure is None:
            self.failure = text, cause

    def end(self) -> None:
        """Release the memory and all waiters."""
        self.memory, self._tensor = np.empty(0, np.uint8), None
        self._ended.set()


_Block = tuple[Transfer, int]
"""A transfer, and the number of the block; -1: wait for `Transfer.ready` before the blocks are queued."""


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """Return a tensor's memory, which the caller keeps alive; unlike `Tensor.numpy`, the storage stays resizable."""
    if not tensor.numel():
        return np.empty(0, np.uint8)
    pointer = ctypes.cast(tensor.data_ptr(), ctypes.POINTER(ctypes.c_uint8))
    return np.ctypeslib.as_array(pointer, (tensor.numel(),))


class Threads:
    """I/O threads of one file, from the first transfer until `close` or `forget`; the last one closes the file.

    They hold no reference to the file's owner, which can be freed while they are idle. `block` is a multiple of
    `ALIGNMENT`; `count` is the maximum number of requests in flight.
    """

    def __init__(self, file: TmpFile, block: int, count: int, label: str) -> None:
        self.file = file
        self.block = block
        self.label = label
        self.bytes_read = 0
        self.bytes_written = 0
        self._count = count
        self._lock = threading.Lock()
        self._queue: SimpleQueue[bool] = SimpleQueue()  # True: a block is queued; False: threads end after all blocks
        self._blocks: tuple[deque[_Block], deque[_Block]] = deque(), deque()  # to be read, to be written
        self._wrote = True  # the last taken block was a write
        self._threads: list[threading.Thread] = []
        self._alive = 0
        self.closed = False
        """True if new transfers are refused and queued blocks are discarded."""

    def begin(
        self, values: Values, memory: torch.Tensor, *, writes: bool, ready: Callable[[], None] | None = None
    ) -> Transfer:
        """Start a transfer of host memory (uint8, contiguous), after the pending one of the same values.

        One thread calls `ready` before the first block.

        Raises OffloadError if the file is closed.
        """
        transfer = Transfer(self, values, memory, writes, ready)
        with self._lock:
            if self.closed:
                raise OffloadError(f"{self.label}: it is closed")
            if not self._threads:
                bounce = paged(self._count * self.block)  # allocated by the system on first use
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
        """Stop the threads and close the file soon, without waiting; pending transfers fail.

        Because a finalizer may call it anywhere, it takes no lock.
        """
        if not self.closed:
            self.closed = True
            if self._threads:
                self._queue.put(False)
            else:
                os.close(self.file.descriptor)

    def close(self) -> None:
        """Stop the threads and close the file before returning; pending transfers fail."""
        with self._lock:
            self.forget()
        for thread in self._threads:
            thread.join()

    def _start(self, transfer: Transfer | None) -> None:
        """Queue the blocks of a transfer; end transfers without blocks and continue with the next one."""
        while transfer is not None:
            if transfer.ready is not None:
                self._blocks[transfer.writes].append((transfer, -1))
                self._queue.put(True)
                return
            values, size = transfer.values, transfer.memory.size
            if self.closed:
                transfer.fail(_CLOSED)
            elif transfer.writes:
                values.size, values.sums = -1, [0] * -(-size // self.block)
            elif values.size != size:
                there = f"{values.size} bytes have been written"
                if values.size < 0:
                    there = "nothing has been written, or a write has failed"
                transfer.fail(f"{size} bytes are to be read at offset {values.place}, where {there}")
            transfer.left = 0 if transfer.failure is not None else -(-size // self.block)
            for number in range(transfer.left):
                self._blocks[transfer.writes].append((transfer, number))
                self._queue.put(True)
            transfer = None if transfer.left else self._end(transfer)

    def _end(self, transfer: Transfer) -> Transfer | None:
        """End a transfer without pending blocks; return its successor."""
        values, size = transfer.values, transfer.memory.size
        if transfer.failure is None:
            if transfer.writes:
                values.size = size
                self.bytes_written += size
            else:
                self.bytes_read += size
        if values.last is transfer:
            values.last = None
        after, transfer.next = transfer.next, None
        transfer.end()
        return after

    def _work(self, bounce: Bytes) -> None:
        while True:
            if self._queue.get():
                self._take(*self._next(), bounce)  # an idle thread keeps no transfer alive
                continue
            self._queue.put(False)  # for the other threads
            with self._lock:  # held by a caller that is queueing blocks
                if any(self._blocks):
                    continue
                self._alive -= 1
                if not self._alive:
                    os.close(self.file.descriptor)
            return

    def _next(self) -> _Block:
        with self._lock:
            block = (self._blocks[not self._wrote] or self._blocks[self._wrote]).popleft()
            self._wrote = block[0].writes
        return block

    def _take(self, transfer: Transfer, number: int, bounce: Bytes) -> None:
        if self.closed:
            transfer.fail(_CLOSED)
        if transfer.failure is None:
            try:
                if transfer.ready is not None:
                    transfer.ready()
                else:
                    self._move(transfer, number, bounce)
            except Exception as error:
                what = "writing" if transfer.writes else "reading"
                reason = (error.strerror or str(error)) if isinstance(error, OSError) else repr(error)
                transfer.fail(f"{what} {self._where(transfer, number)}: {reason}", error)
        with self._lock:
            if transfer.ready is not None:
                transfer.ready = None
                self._start(transfer)
                return
            transfer.left -= 1
            if not transfer.left:
                self._start(self._end(transfer))

    def _where(self, transfer: Transfer, number: int) -> str:
        if number < 0:
            return f"values at offset {transfer.values.place}, which a device copies first"
        start = number * self.block
        size = min(self.block, transfer.memory.size - start)
        return f"{size} bytes at offset {transfer.values.place + start}"

    def _move(self, transfer: Transfer, number: int, bounce: Bytes) -> None:
        """Read or write one block; unaligned memory and tails pass through the bounce buffer with direct I/O.

        numpy copies and sums without the GIL and without threads of its own.
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
            # Starts the write-back of written pages, and drops read pages.
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
    """Stop all threads before interpreter exit, which would kill them inside numpy and crash the process."""
    for threads in list(_RUNNING):
        threads.close()


_CLOSED = "it was closed before the transfer had ended"


def _sum(data: Bytes) -> int:
    """Return the sum of the bytes as 64-bit numbers, modulo 2^64."""
    whole = data.size - data.size % 8
    found = int(np.add.reduce(data[:whole].view(np.uint64)))
    return (found + int.from_bytes(data[whole:].tobytes(), "little")) % 2**64
