"""Pool of host buffers for copies from and to a device, of exact sizes, reused from pass to pass.

Because pinning memory takes longer than copying into it once, pinned buffers are kept. Because torch's pinned-memory
allocator rounds sizes up to powers of two, buffers of a CUDA device are own memory mappings.
"""

from __future__ import annotations

import bisect

import torch

from shardwise.device.hostmemory import mapped
from shardwise.device.pinned import pin, unpin
from shardwise.device.staging import Copied

_LARGER = 2  # a kept buffer serves a request if it is at most this many times larger


_Kept = tuple[torch.Tensor, "Copied | None", int]
"""A buffer, the event after the last copy from it, and the round of its release."""


class HostBuffers:
    """Buffer pool of one device; `keep` keeps released buffers (None: on CUDA only); `pinned`: all buffers are pinned.

    >>> buffers = HostBuffers(torch.device("cpu"), keep=True)
    >>> buffer = buffers.take(100)
    >>> buffers.give_back(buffer, None)
    >>> buffers.take(60).numel(), buffers.take(60) is buffer
    (100, False)
    """

    def __init__(self, device: torch.device, keep: bool | None = None) -> None:
        self._cuda = device.type == "cuda"
        self.keep = self._cuda if keep is None else keep or self._cuda
        self._kept: dict[int, list[_Kept]] = {}  # by size
        self._sizes: list[int] = []  # sorted sizes of kept buffers
        self._addresses: dict[int, int] = {}  # of pinned buffers, by id()
        self._out = 0
        self._round = 0
        self.pinned = self._cuda

    def take(self, size: int, *, real: bool = True) -> torch.Tensor:
        """Return the smallest kept buffer of `size` bytes or slightly more, or a new one (not `real`: a dry run)."""
        if not self._out:
            self._begin_round()
        self._out += 1
        place = bisect.bisect_left(self._sizes, size)
        if place < len(self._sizes) and self._sizes[place] <= _LARGER * size:
            entries = self._kept[self._sizes[place]]
            buffer = entries.pop()[0]
            if not entries:
                del self._kept[self._sizes.pop(place)]
            return buffer
        if not (self._cuda and real):
            return torch.empty(size, dtype=torch.uint8, device="cpu")
        return self._mapped(size)

    def give_back(self, buffer: torch.Tensor, copied: Copied | None) -> None:
        """Release a buffer that only copies up to the event `copied` still use."""
        self._out -= 1
        if self.keep:
            self._put((buffer, copied, self._round))

    def _put(self, entry: _Kept) -> None:
        size = entry[0].numel()
        if size not in self._kept:
            self._kept[size] = []
            bisect.insort(self._sizes, size)
        self._kept[size].append(entry)

    def _empty(self) -> list[_Kept]:
        entries = [entry for kept in self._kept.values() for entry in kept]
        self._kept.clear()
        self._sizes.clear()
        return entries

    def _begin_round(self) -> None:
        """Free the buffers that the previous round did not use. All buffers have been released at this point."""
        if any(entry[2] < self._round for kept in self._kept.values() for entry in kept):
            entries = self._empty()
            for entry in entries:
                if entry[2] == self._round:
                    self._put(entry)
            self._let_go([entry for entry in entries if entry[2] < self._round])
        self._round += 1

    def _mapped(self, size: int) -> torch.Tensor:
        buffer = mapped(size)
        if pin(buffer.data_ptr(), size):
            self._addresses[id(buffer)] = buffer.data_ptr()
        else:
            self.pinned = False
        return buffer

    def _let_go(self, entries: list[_Kept]) -> None:
        for buffer, copied, _ in entries:
            if copied is not None:
                copied.synchronize()
            if id(buffer) in self._addresses:
                unpin(self._addresses.pop(id(buffer)))

    def close(self) -> None:
        """Free all kept buffers."""
        self._let_go(self._empty())

    def __del__(self) -> None:
        self.close()
