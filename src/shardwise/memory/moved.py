"""Temporary offload of tensors to the host, which frees their device memory."""

from __future__ import annotations

from typing import NamedTuple

import torch

from shardwise.device.hostmemory import HostMemory, HostPool
from shardwise.device.staging import copy_stream
from shardwise.memory.accountant import Accountant, Category, Tier


class HostCopy(NamedTuple):
    """Bytes of a tensor on the host; `memory`: their page-locked memory, if any."""

    values: torch.Tensor
    memory: HostMemory | None


class MovedTensors:
    """Host copies of tensors that are unused for a while.

    A tensor and its views stay, but have no memory and must not be used. Copies run concurrently with compute, after
    earlier work of the current stream. Device memory is reused only after the copies. `pinned`: on a CUDA device
    page-lock the host memory, for asynchronous copies; it is kept for the next time.

    >>> moved = MovedTensors(torch.device("cpu"), Accountant())
    >>> tensor = torch.arange(4)
    >>> moved.put(tensor)
    >>> tensor.untyped_storage().nbytes()
    0
    >>> moved.bring()
    >>> tensor
    tensor([0, 1, 2, 3])
    """

    def __init__(self, device: torch.device, accountant: Accountant) -> None:
        self._copies = copy_stream(device)
        self._accountant = accountant
        self._pool = HostPool(self._copies)
        self.pinned = True
        self._put: dict[int, tuple[torch.Tensor, HostCopy, Category | None]] = {}  # by storage

    def has(self, tensor: torch.Tensor) -> bool:
        """Return True if the memory of a tensor is offloaded."""
        return id(tensor.untyped_storage()) in self._put

    def put(self, tensor: torch.Tensor, category: Category | None = None) -> None:
        """Offload the memory of a tensor, once for all its views; `category`, if the accountant counts it by number."""
        storage = tensor.untyped_storage()
        if self.has(tensor) or not storage.nbytes():
            return
        self._put[id(storage)] = (tensor, self.copy(tensor), category)
        size = storage.nbytes()
        storage.resize_(0)
        if category is None:
            self._accountant.rehouse(tensor, Tier.HOST)
        else:
            self._accountant.remove(category, size)
            self._accountant.add(category, size, Tier.HOST)

    def copy(self, tensor: torch.Tensor) -> HostCopy:
        """Start a copy of a tensor's memory to the host; the device memory may be freed at once."""
        source = _bytes(tensor)
        size = source.numel()
        with self._accountant.owning(None):
            memory = self._pool.take(max(1, size)) if self.pinned else None
            values = torch.empty(size, dtype=torch.uint8, device="cpu") if memory is None else memory.bytes[:size]
            self._copies.follow()
            self._copies.copy(values, source)
            self._copies.keep(source)
        if memory is not None:
            memory.used(self._copies.mark())
        return HostCopy(values, memory)

    def bring(self) -> None:
        """Restore all tensors, for the current stream. If memory runs out, the others can be restored later."""
        for key, (tensor, copied, category) in list(self._put.items()):
            # Allocated on the current stream, which owns the memory from now on.
            size = copied.values.numel()
            tensor.untyped_storage().resize_(size)
            self.fill(tensor, copied)
            del self._put[key]
            if category is None:
                self._accountant.rehouse(tensor, Tier.DEVICE)
            else:
                self._accountant.remove(category, size, Tier.HOST)
                self._accountant.add(category, size)

    def fill(self, tensor: torch.Tensor, copied: HostCopy) -> None:
        """Move the result of `copy` into the memory of a tensor, for the current stream."""
        self._copies.follow()
        self._copies.copy(_bytes(tensor), copied.values)
        ended = self._copies.mark()
        ended.wait()
        if copied.memory is not None:
            copied.memory.used(ended)
            self._pool.give_back(copied.memory)

    def synchronize(self) -> None:
        """Block the host until all copies finish."""
        self._copies.mark().synchronize()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
