"""Endless iteration over a loader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shardwise.errors import UsageError


class RepeatingLoader:
    """Endless iterator over a repeatable `loader`, which starts the next epoch at the end of each. `set_epoch` of the
    loader, its sampler or its batch sampler is called for each new epoch, if available.

    >>> batches = RepeatingLoader([1, 2])
    >>> [next(batches) for _ in range(5)]
    [1, 2, 1, 2, 1]
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._iterator: Iterator[Any] | None = None
        self._epoch = self._loads = 0

    def __iter__(self) -> RepeatingLoader:
        return self

    def __len__(self) -> int:
        return len(self.loader)

    def __next__(self) -> Any:
        loads = getattr(self.loader, "loads", 0)
        if self._iterator is None or loads != self._loads:  # a restored position needs a new iterator
            self._iterator, self._loads = iter(self.loader), loads
        try:
            return next(self._iterator)
        except StopIteration:
            self._begin_epoch()
        try:
            return next(self._iterator)
        except StopIteration:
            raise UsageError(
                f"the {type(self.loader).__name__} gives no batches, so it cannot be repeated; its dataset is empty, "
                "or it is an iterator, which can be read only once"
            ) from None

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's position. Raises UsageError if the loader has no `state_dict`."""
        return self._with_state().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the loader's position. Raises UsageError if the loader has no `state_dict`."""
        self._with_state().load_state_dict(state)
        self._iterator = None

    def _with_state(self) -> Any:
        if not hasattr(self.loader, "state_dict"):
            raise UsageError(
                f"a {type(self.loader).__name__} cannot tell its position; use shardwise's loader (pass training_data "
                "to initialize) or one with state_dict and load_state_dict"
            )
        return self.loader

    def _begin_epoch(self) -> None:
        samplers = [getattr(self.loader, name, None) for name in ("sampler", "batch_sampler")]
        for owner in (self.loader, *samplers):
            if hasattr(owner, "set_epoch"):
                self._epoch = getattr(owner, "epoch", self._epoch) + 1
                owner.set_epoch(self._epoch)
                break
        self._iterator = iter(self.loader)
