"""Memory of the host for copies of what lies on a device: as large as is asked for, and used again from pass to pass.

Pinning memory takes longer than copying into it once, and torch's own allocator of pinned memory rounds sizes up to
powers of two. So buffers of a CUDA device are mappings of their own, which are pinned once and kept.
"""

from __future__ import annotations

import mmap

import torch

from shardwise.device.pinned import pin, unpin
from shardwise.device.staging import Copied

_LARGER = 2
"""What is kept serves for requests of at least this part of its size."""


class HostBuffers:
    """Buffers of one device.

    Args:
        device: from and to which they are copied.
        keep: keep what is given back for later requests; None: where the device is CUDA.

    Attributes:
        keep: see above.
        pinned: whether all memory that has been taken is pinned.

    Example:
        >>> buffers = HostBuffers(torch.device("cpu"), keep=True)
        >>> buffer = buffers.take(100)
        >>> buffers.give_back(buffer, None)
        >>> buffers.take(60).numel(), buffers.take(60) is buffer
        (100, False)
    """

    def __init__(self, device: torch.device, keep: bool | None = None) -> None:
        self._cuda = device.type == "cuda"
        self.keep = self._cuda if keep is None else keep or self._cuda
        self._kept: list[tuple[torch.Tensor, Copied | None, int]] = []
        self._addresses: dict[int, int] = {}  # of pinned buffers, by id()
        self._out = 0
        self._round = 0
        self.pinned = self._cuda

    def take(self, size: int, *, real: bool = True) -> torch.Tensor:
        """Return at least so many bytes, of undefined content: the smallest kept buffer that is not far too large.

        Args:
            size: in bytes.
            real: False: of a dry run, in which no memory is taken.
        """
        if not self._out:
            self._begin_round()
        self._out += 1
        fitting = [entry for entry in self._kept if size <= entry[0].numel() <= _LARGER * size]
        if fitting:
            entry = min(fitting, key=lambda entry: entry[0].numel())
            self._kept = [other for other in self._kept if other is not entry]
            return entry[0]
        if not (self._cuda and real):
            return torch.empty(size, dtype=torch.uint8, device="cpu")
        return self._mapped(size)

    def give_back(self, buffer: torch.Tensor, copied: Copied | None) -> None:
        """Take a buffer back.

        Args:
            buffer: that nobody reads or writes any more but the copies up to the mark.
            copied: behind the last copy from it.
        """
        self._out -= 1
        if self.keep:
            self._kept.append((buffer, copied, self._round))

    def _begin_round(self) -> None:
        """Let go of what the round before, in which everything was given back in the end, had no use for."""
        idle = [entry for entry in self._kept if entry[2] < self._round]
        self._kept = [entry for entry in self._kept if entry[2] == self._round]
        self._round += 1
        self._let_go(idle)

    def _mapped(self, size: int) -> torch.Tensor:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        buffer = torch.frombuffer(memory, dtype=torch.uint8)
        if pin(buffer.data_ptr(), size):
            self._addresses[id(buffer)] = buffer.data_ptr()
        else:
            self.pinned = False
        return buffer

    def _let_go(self, entries: list[tuple[torch.Tensor, Copied | None, int]]) -> None:
        for buffer, copied, _ in entries:
            if copied is not None:
                copied.synchronize()
            if id(buffer) in self._addresses:
                unpin(self._addresses.pop(id(buffer)))

    def close(self) -> None:
        """Let go of everything that is kept."""
        kept, self._kept = self._kept, []
        self._let_go(kept)

    def __del__(self) -> None:
        self.close()
