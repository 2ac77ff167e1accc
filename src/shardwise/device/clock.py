"""Times of what runs on a device: on a CUDA device those of its events, on a CPU those of the clock."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch

Instant = Any
"""A time of the host in seconds, or an event of a device."""


def now(cuda: bool) -> Instant:
    """Return this time, as the current stream will see it; the host does not wait.

    Args:
        cuda: what is timed runs on the current CUDA device.
    """
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(start: Instant, end: Instant) -> float:
    """Return how long it was from one `now` to a later one, waiting for the device to get there.

    >>> start = now(cuda=False)
    >>> 0.0 <= seconds_between(start, now(cuda=False)) < 60.0
    True
    """
    if isinstance(end, float):
        return end - start
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


Interval = tuple[str, Instant, Instant]
"""Name, begin and end of what has been timed."""


class Timed:
    """Notes when a block has begun and ended.

    Args:
        name: of the block.
        into: where it is noted.
        cuda: see `now`.

    Example:
        >>> intervals: list[Interval] = []
        >>> for _ in range(2):
        ...     with Timed("load", intervals, cuda=False):
        ...         pass
        >>> len(intervals), list(add_up(intervals, {}))
        (2, ['load'])
    """

    __slots__ = ("_begun", "_cuda", "_into", "_name")  # one is made for each collective of a step

    def __init__(self, name: str, into: list[Interval], cuda: bool) -> None:
        self._name, self._into, self._cuda = name, into, cuda

    def __enter__(self) -> None:
        self._begun = now(self._cuda)

    def __exit__(self, *_: object) -> None:
        self._into.append((self._name, self._begun, now(self._cuda)))


def add_up(intervals: Iterable[Interval], sums: dict[str, float]) -> dict[str, float]:
    """Add the seconds of intervals to the sum of their name, waiting for the device; return the sums."""
    for name, begun, ended in intervals:
        sums[name] = sums.get(name, 0.0) + seconds_between(begun, ended)
    return sums
