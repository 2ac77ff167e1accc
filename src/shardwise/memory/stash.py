"""Putting tensors aside on the host for a while: their memory on the device is somebody else's until they come back."""

from __future__ import annotations

import torch

from shardwise.device.staging import copy_stream
from shardwise.memory.accountant import Accountant, Category, Tier


class Stash:
    """Memory of the host that keeps the values of tensors which are not used for a while.

    A tensor stays what it is, with all its views, but has no memory: nobody may read or write it. Copies run beside
    what the device computes, behind what the current stream has been given before; memory of the device is used again
    only when they have been made.

    Args:
        device: where the tensors are used.
        accountant: is told of the bytes.
        pinned: on a CUDA device page-lock the memory of the host, so that copies need not wait for it.

    Example:
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
        """Whether the memory behind a tensor has been put aside."""
        return id(tensor.untyped_storage()) in self._put

    def put(self, tensor: torch.Tensor, category: Category | None = None) -> None:
        """Take the memory behind a tensor, once however many views it has; nothing happens if it has none.

        Args:
            tensor: one of its views.
            category: if its bytes are told the accountant by their number, and not held as a tensor.
        """
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
        """Begin to copy the memory behind a tensor to the host; that on the device may be given back at once."""
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
        """Give all tensors memory and values again, for the current stream.

        What has come back has, should memory run out on the way: the rest can be brought later.
        """
        for key, (tensor, values, category) in list(self._put.items()):
            # Taken on the current stream, to which the memory belongs from now on.
            tensor.untyped_storage().resize_(values.numel())
            self.fill(tensor, values)
            del self._put[key]
            if category is None:
                self._accountant.rehouse(tensor, Tier.DEVICE)
            else:
                self._accountant.remove(category, values.numel(), Tier.HOST)
                self._accountant.add(category, values.numel())

    def fill(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Bring what `copy` has returned into the memory behind a tensor, for the current stream."""
        self._copies.follow()
        self._copies.copy(_bytes(tensor), values)
        self._copies.mark().wait()

    def synchronize(self) -> None:
        """Have the host wait for all copies that have begun."""
        self._copies.mark().synchronize()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of the memory behind a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
