"""Times of a step's parts, from CUDA events on a GPU (read after a host wait), from the host's clock on a CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from typing_extensions import override

from shardwise.device.clock import Interval, Timed, add_up
from shardwise.device.ranges import Listener, listening

FORWARD, BACKWARD, INNER, REDUCE, STEP = "fwd", "bwd", "bwd_inner", "bwd_allreduce", "step"

_PENDING = 4096  # maximum number of CUDA intervals before they are summed


class Breakdown(Listener):
    """Sums the time of each part; `cuda`: parts run on the current CUDA device."""

    ranges: frozenset[str] | None = frozenset({"reduce", "wait for reduction"})

    def __init__(self, cuda: bool) -> None:
        self._cuda = cuda
        self._sums: dict[str, float] = {}
        self._pending: list[Interval] = []

    def part(self, name: str) -> Timed:
        """Time the block as a part."""
        if len(self._pending) > _PENDING:  # the device has passed the older half long ago
            self._fold(_PENDING // 2)
        return Timed(name, self._pending, self._cuda)

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Time the block as a backward pass, and the reductions in it."""
        with listening(self), self.part(BACKWARD):
            yield

    @override
    def around(self, what: str, unit: str, size: int) -> Timed:
        return self.part(REDUCE)

    def flight(self, what: str, unit: str, size: int) -> Callable[[], None]:
        """Ignore asynchronous operations, which the host does not wait for."""
        return lambda: None

    def _fold(self, count: int) -> None:
        add_up(self._pending[:count], self._sums)
        del self._pending[:count]

    def read(self) -> dict[str, float]:
        """Return the seconds of each recorded part and reset, waiting for the device.

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
