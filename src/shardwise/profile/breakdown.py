"""Times of the parts of a step: on a CUDA device those of its events, for which the host waits when they are read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from typing_extensions import override

from shardwise.device.clock import Interval, Timed, add_up
from shardwise.device.ranges import Listener, listening

FORWARD, BACKWARD, INNER, REDUCE, STEP = "fwd", "bwd", "bwd_inner", "bwd_allreduce", "step"

_PENDING = 4096
"""Intervals of a device that are kept before they are added up."""


class Breakdown(Listener):
    """Adds up the time of each part.

    Args:
        cuda: parts run on the current CUDA device.

    Attributes:
        ranges: see `shardwise.device.ranges.Listener`.
    """

    ranges: frozenset[str] | None = frozenset({"reduce", "wait for reduction"})

    def __init__(self, cuda: bool) -> None:
        self._cuda = cuda
        self._sums: dict[str, float] = {}
        self._pending: list[Interval] = []

    def part(self, name: str) -> Timed:
        """Time the block as a part of this name."""
        if len(self._pending) > _PENDING:  # the older half has been reached long ago
            self._fold(_PENDING // 2)
        return Timed(name, self._pending, self._cuda)

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Time the block as a backward pass, and what reductions take of it."""
        with listening(self), self.part(BACKWARD):
            yield

    @override
    def around(self, what: str, unit: str, size: int) -> Timed:
        return self.part(REDUCE)

    def flight(self, what: str, unit: str, size: int) -> Callable[[], None]:
        """See `shardwise.device.ranges.Listener`: nobody waits for it here."""
        return lambda: None

    def _fold(self, count: int) -> None:
        add_up(self._pending[:count], self._sums)
        del self._pending[:count]

    def read(self) -> dict[str, float]:
        """Return the seconds of each part that there was, and begin anew; waits for the device.

        Example:
            >>> times = Breakdown(cuda=False)
            >>> with times.backward(), times.part(FORWARD):
            ...     pass
            >>> list(times.read()), times.read()
            (['fwd', 'bwd', 'bwd_inner', 'bwd_allreduce'], {})
        """
        self._fold(len(self._pending))
        sums, self._sums = self._sums, {}
        if BACKWARD in sums:
            sums.setdefault(REDUCE, 0.0)
            sums[INNER] = sums[BACKWARD] - sums[REDUCE]
        return {name: sums[name] for name in (FORWARD, BACKWARD, INNER, REDUCE, STEP) if name in sums}
