"""Host memory of exact size, page-locked (pinned) where a CUDA device copies from it, and a pool of such memory.

Because torch's pinned-memory allocator rounds sizes up to powers of two and keeps released blocks, long-lived tensors
on the host would take up to twice their size.
"""

from __future__ import annotations

import bisect
import contextlib
import mmap
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from shardwise.device.staging import Copied, CopyStream

HUGE = 2 << 20
"""Bytes of a huge page."""

_LARGER = 2  # a pooled block that is at most this many times larger than a request serves it without need


def pin(device: torch.device, address: int, size: int) -> bool:
    """Pin mapped memory of this process (needs CUDA and a sufficient locked-memory limit); return True on success."""
    return torch.cuda.is_available() and _succeeds(device, torch.cuda.cudart().cudaHostRegister, address, size, 0)


def unpin(device: torch.device, address: int) -> None:
    """Unpin memory before it is unmapped."""
    _succeeds(device, torch.cuda.cudart().cudaHostUnregister, address)


def _succeeds(device: torch.device, function: Any, *arguments: int) -> bool:
    # A new thread's current device is device 0, where the call would create a context.
    with torch.cuda.device(device):
        with contextlib.suppress(RuntimeError):
            if int(function(*arguments)) == 0:
                return True
        # CUDA keeps the error for the next kernel launch, which would raise it in an unrelated operation.
        with contextlib.suppress(RuntimeError):
            torch.empty(1, device=device).fill_(0)
    return False


def mapped(size: int) -> torch.Tensor:
    """Return `size` zeroed bytes in an own memory mapping, which is unmapped when its last tensor is freed.

    Large memory uses huge pages if available, which mean fewer pages to lock, and to send to a disk one by one.
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= HUGE:
        with contextlib.suppress(OSError, AttributeError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


class HostMemory:
    """One block of `size` bytes (above 0) of host memory, of undefined content; without `real`: a dry run.

    >>> memory = HostMemory(CopyStream(torch.device("cpu")), 3)
    >>> memory.bytes.numel()
    3
    """

    def __init__(self, copies: CopyStream, size: int, *, locked: bool = True, real: bool = True) -> None:
        self._address, self._device = 0, copies.device
        self._noting = threading.Lock()
        self._used: list[Copied] = []
        self.size = size
        if not real:
            self.bytes = torch.empty(size, dtype=torch.uint8, device="cpu")
            return
        if copies.device.type != "cuda":
            self.bytes = copies.host_bytes(size)
            return
        self.bytes = mapped(size)
        if locked and pin(self._device, self.bytes.data_ptr(), size):
            self._address = self.bytes.data_ptr()
        elif locked:
            self.bytes = copies.host_bytes(size)

    def used(self, copied: Copied) -> None:
        """Record that copies up to an event use the memory; it stays allocated until they finish."""
        with self._noting:  # threads that help peers also copy from it
            self._used = [*(earlier for earlier in self._used if not earlier.made), copied]

    def wait(self) -> None:
        """Block the host until all recorded copies finish."""
        with self._noting:
            used, self._used = self._used, []
        for copied in used:
            copied.synchronize()

    def precede(self, copies: CopyStream) -> None:
        """Make later copies of a stream wait for all recorded copies, of any stream."""
        with self._noting:
            used = self._used
        for copied in used:
            copies.come_behind(copied)

    def __del__(self) -> None:
        if self._address and not sys.is_finalizing():
            self.wait()
            unpin(self._device, self._address)


class HostPool:
    """Pool of host memory for the copies of one stream, reused from pass to pass because pinning takes long.

    `keep` keeps released blocks; a CUDA device's are always kept. All blocks together have at most as many bytes as the
    most that have been in use at one time: passes of varying lengths allocate no more than the longest one. `hold`
    counts the memory of each new block until it is freed. Any thread may call.

    >>> pool = HostPool(CopyStream(torch.device("cpu")), keep=True)
    >>> memory = pool.take(100)
    >>> pool.give_back(memory)
    >>> pool.take(10) is memory, pool.take(60).size
    (True, 60)
    """

    def __init__(
        self, copies: CopyStream, keep: bool | None = None, hold: Callable[[torch.Tensor], None] | None = None
    ) -> None:
        self._copies = copies
        self.keep = keep or copies.device.type == "cuda"
        self._hold = hold
        self._lock = threading.Lock()
        self._kept: list[HostMemory] = []  # by size
        self._returned: deque[tuple[int, HostMemory | None]] = deque()  # sizes, and blocks to be kept
        self._used = self._most = 0  # bytes in use, now and at most

    def take(self, size: int, *, real: bool = True) -> HostMemory:
        """Return a kept block of `size` bytes or more, or a new one (not `real`: a dry run).

        A much larger block is returned only if a new one would exceed the limit of the pool.
        """
        memory: HostMemory | None = None
        evicted: list[HostMemory] = []
        with self._lock:
            self._take_back()
            place = bisect.bisect_left(self._kept, size, key=_size)
            room = self._most - self._used - sum(map(_size, self._kept))
            if place < len(self._kept) and (self._kept[place].size <= _LARGER * size or size > room):
                memory = self._kept.pop(place)
            while memory is None and self._kept and size > room:  # all are smaller
                evicted.append(self._kept.pop(0))
                room += evicted[-1].size
            self._used += size if memory is None else memory.size
            self._most = max(self._most, self._used)
        if memory is None:
            evicted.clear()  # before others are allocated; it waits for their copies, while other threads may call
            with torch.inference_mode(False):  # later copies write into it
                memory = HostMemory(self._copies, size, real=real)
            if self._hold is not None:
                self._hold(memory.bytes)
        return memory

    def give_back(self, memory: HostMemory) -> None:
        """Release a block, which only the recorded copies still use.

        Because a finalizer may call it anywhere, it takes no lock.
        """
        self._returned.append((memory.size, memory if self.keep else None))

    def _take_back(self) -> None:
        while self._returned:
            size, memory = self._returned.popleft()
            self._used -= size
            if memory is not None:  # behind others of its size, whose copies have more likely ended
                bisect.insort_right(self._kept, memory, key=_size)

    def close(self) -> None:
        """Free all kept blocks."""
        with self._lock:
            self._take_back()
            kept, self._kept = self._kept, []
        del kept  # which waits for copies


def _size(memory: HostMemory) -> int:
    return memory.size
