"""Persistent host memory of exact size, page-locked (pinned) where a CUDA device copies from it.

Because torch's pinned-memory allocator rounds sizes up to powers of two and keeps released blocks, long-lived tensors
on the host would take up to twice their size.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
import threading

import torch

from shardwise.device.pinned import pin, unpin
from shardwise.device.staging import Copied, CopyStream

_HUGE = 2 << 20


def mapped(size: int) -> torch.Tensor:
    """Return `size` bytes in an own memory mapping, which is unmapped when its last tensor is freed."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= _HUGE:
        with contextlib.suppress(OSError, AttributeError):  # huge pages are optional; they mean fewer pages to lock
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


class HostMemory:
    """One block of `size` bytes (above 0) of persistent host memory, of undefined content; without `real`: a dry run.

    >>> memory = HostMemory(CopyStream(torch.device("cpu")), 3)
    >>> memory.bytes.numel()
    3
    """

    def __init__(self, copies: CopyStream, size: int, *, locked: bool = True, real: bool = True) -> None:
        self._address = 0
        self._noting = threading.Lock()
        self._used: list[Copied] = []
        if not real:
            self.bytes = torch.empty(size, dtype=torch.uint8, device="cpu")
            return
        if copies.device.type != "cuda":
            self.bytes = copies.host_bytes(size)
            return
        self.bytes = mapped(size)
        if locked and pin(self.bytes.data_ptr(), size):
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

    def __del__(self) -> None:
        if self._address and not sys.is_finalizing():
            self.wait()
            unpin(self._address)
