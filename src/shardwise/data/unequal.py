"""Unequal parts of the ranks in micro-batches: which rank gets how many samples, and from when on."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

Sizes = tuple[int, ...]
"""Samples of each data-parallel rank in a micro-batch."""


class Unequal:
    """Sizes of the ranks' parts in the micro-batches of an epoch, whose sum stays the same.

    >>> unequal = Unequal([2, 2])
    >>> unequal.change(5, [3, 1])
    >>> unequal.at(4), unequal.at(5)
    ((2, 2), (3, 1))
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._changes: list[tuple[int, Sizes]] = [(0, tuple(sizes))]

    @property
    def newest(self) -> Sizes:
        """The sizes that were set last, which may hold only later."""
        return self._changes[-1][1]

    def at(self, number: int) -> Sizes:
        """Return the sizes in a micro-batch of the epoch, by its number from 0."""
        return next(sizes for first, sizes in reversed(self._changes) if first <= number)

    def change(self, first: int, sizes: Sequence[int]) -> None:
        """Set the sizes from a micro-batch of the epoch on."""
        self._changes = [change for change in self._changes if change[0] < first] + [(first, tuple(sizes))]

    def begin_epoch(self) -> None:
        """Keep the newest sizes, from the first micro-batch on."""
        self._changes = [(0, self.newest)]

    def state(self, number: int) -> list[list[object]]:
        """Return the change in force at a micro-batch, and later ones, as JSON types."""
        begun = max(first for first, _ in self._changes if first <= number)
        return [[first, list(sizes)] for first, sizes in self._changes if first >= begun]


def divided_by_speed(total: int, speeds: Sequence[float], most: int) -> Sizes:
    """Return the sizes (at least 1, at most `most`) of sum `total` for which the slowest rank is soonest ready.

    `speeds`: samples per second of each rank. With `most` too small for the sum, all ranks have it.

    >>> divided_by_speed(8, [3.0, 1.0], most=8)
    (6, 2)
    >>> divided_by_speed(8, [3.0, 1.0], most=5)
    (5, 3)
    """
    sizes = [1] * len(speeds)
    ready = [(2 / speed, rank) for rank, speed in enumerate(speeds)]
    heapq.heapify(ready)
    for _ in range(total - len(speeds)):
        while ready and sizes[ready[0][1]] >= most:
            heapq.heappop(ready)
        if not ready:
            break
        _, rank = ready[0]
        sizes[rank] += 1
        heapq.heapreplace(ready, ((sizes[rank] + 1) / speeds[rank], rank))
    return tuple(sizes)
