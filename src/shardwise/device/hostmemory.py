"""Memory of the host that stays: as large as is asked for, and page-locked where a CUDA device copies from it.

torch's own allocator of page-locked memory rounds sizes up to powers of two, and keeps what it is given back. That is
right for what comes and goes; what lives on the host would take up to twice its size.
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
    """Return so many bytes in pages of their own, which go back to the system with the last tensor in them."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= _HUGE:
        with contextlib.suppress(OSError, AttributeError):  # not every system has them; there are fewer pages to lock
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


class HostMemory:
    """See the module docstring.

    Args:
        copies: copies between it and the device.
        size: in bytes, above 0.
        locked: page-lock it.
        real: False: of a dry run, in which no memory is taken.

    Attributes:
        bytes: the memory, of undefined content.

    Example:
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
        """Note that copies up to a place read or write it: it is there until they are made."""
        with self._noting:  # threads that help peers read, too
            self._used = [*(earlier for earlier in self._used if not earlier.made), copied]

    def wait(self) -> None:
        """Have the host wait until no copy reads or writes it any more."""
        with self._noting:
            used, self._used = self._used, []
        for copied in used:
            copied.synchronize()

    def __del__(self) -> None:
        if self._address and not sys.is_finalizing():
            self.wait()
            unpin(self._address)
