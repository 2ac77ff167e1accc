"""Temporary offload of tensors to the host, which frees their device memory."""

from __future__ import annotations

import torch

from shardwise.device.staging import copy_stream
from shardwise.memory.accountant import Accountant, Category, Tier


class Stash:
    """Host copies of tensors that are unused for a while.

    A tensor and its views stay, but have no memory and must not be used. Copies run concurrently with compute, after
    earlier work of the current stream. Device memory is reused only after the copies. `pinned`: on a CUDA device
    page-lock the host memory, for asynchronous copies.

    >>> stash = Stash(torch.device("cpu"), Accountant())
    >>> tensor = torch.arange(4)
    >>> stash.put(tensor)
    >>> tensor.untyped_storage().nbytes()
    0
    >>> stash.bring()
    >>> tensor
    tensor([0, 1, 2, 3])
    """

    def __init__(self, device: torch.device, accountant: Accountant, *, pinned: bool = True) -> None:
        self._copies = copy_stream(device)
        self._accountant = accountant
        self._pinned = pinned
        self._put: dict[int, tuple[torch.Tensor, torch.Tensor, Category | None]] = {}  # by storage

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

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Start a copy of a tensor's memory to the host; the device memory may be freed at once."""
        source = _bytes(tensor)
        with self._accountant.owning(None):
            if self._pinned:
                values = self._copies.host_bytes(source.numel())
            else:
                values = torch.empty(source.numel(), dtype=torch.uint8, device="cpu")
            self._copies.follow()
            self._copies.copy(values, source)
            self._copies.keep(source)
        return values

    def bring(self) -> None:
        """Restore all tensors, for the current stream. If memory runs out, the others can be restored later."""
        for key, (tensor, values, category) in list(self._put.items()):
            # Allocated on the current stream, which owns the memory from now on.
            tensor.untyped_storage().resize_(values.numel())
            self.fill(tensor, values)
            del self._put[key]
            if category is None:
                self._accountant.rehouse(tensor, Tier.DEVICE)
            else:
                self._accountant.remove(category, values.numel(), Tier.HOST)
                self._accountant.add(category, values.numel())

    def fill(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Copy the result of `copy` into the memory of a tensor, for the current stream."""
        self._copies.follow()
        self._copies.copy(_bytes(tensor), values)
        self._copies.mark().wait()

    def synchronize(self) -> None:
        """Block the host until all copies finish."""
        self._copies.mark().synchronize()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
