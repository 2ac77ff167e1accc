"""Host tier (CPU offload): buffers of exact size, pinned where a device copies from them.

A tensor has device memory only while it is acquired. Its values travel on a copy stream, after earlier work of the
current stream, without blocking the host.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from typing_extensions import override

from shardwise.compat import has_values
from shardwise.device.hostmemory import HostMemory
from shardwise.device.staging import Copied, CopyStream, copy_stream
from shardwise.memory import Tier
from shardwise.memory.places import StateHome, Stored


class HostPlace(StateHome):
    """Host tier; `pinned` page-locks the memory on a CUDA device, for asynchronous copies."""

    needs_acquiring = True

    def __init__(self, device: torch.device, *, pinned: bool = True) -> None:
        super().__init__(Tier.HOST)
        self._copies = copy_stream(device)
        self._pinned = pinned

    @override
    def keep(self, tensor: torch.Tensor) -> _Kept:
        return _Kept(self._copies, tensor, pinned=self._pinned)


class _Kept(Stored):
    staged = False

    def __init__(self, copies: CopyStream, tensor: torch.Tensor, *, pinned: bool) -> None:
        self._copies = copies
        self._storage = tensor.untyped_storage()
        self._size = self._storage.nbytes()
        self._bytes = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(self._storage)
        self._memory = HostMemory(copies, self._size, locked=pinned, real=has_values(tensor))
        self._moved: Copied | None = None
        self._is_shared = False

    @override
    def start(self, *, read: bool) -> None:
        with self._copies.use():
            self._storage.resize_(self._size)
        if read:
            self._copies.copy(self._bytes, self._memory.bytes)
        self._moved = self._copies.mark()
        self._memory.used(self._moved)

    @override
    def finish(self) -> None:
        if self._moved is not None:
            self._moved.wait()

    @override
    def give_back(self, *, written: bool) -> None:
        self._copies.follow()
        if written:
            self._copies.copy(self._memory.bytes, self._bytes)
            # Memory on its first release belongs to another stream, which must not reuse it before the copy.
            self._copies.keep(self._bytes)
        with self._copies.use():
            self._storage.resize_(0)
        self._moved = self._copies.mark()
        self._memory.used(self._moved)

    @override
    def follow(self) -> None:
        self._copies.follow()

    def look_ahead(self, target: torch.Tensor | None = None) -> None:
        pass

    def settle(self, leave: Callable[[torch.UntypedStorage], None] | None = None) -> None:
        if self._is_shared:  # else the order of the stream suffices
            self.in_place()

    @override
    def in_place(self) -> torch.Tensor:
        self._memory.wait()
        return self._memory.bytes

    @override
    def shared(self) -> torch.Tensor:
        self._is_shared = True
        return self.in_place()

    @override
    def copy_to(self, target: torch.Tensor) -> None:
        self.finish()
        target.view(-1).view(torch.uint8).copy_(self._memory.bytes, non_blocking=True)
        self._memory.used(self._copies.mark_current())
