"""Timing of device work: with CUDA events on a GPU, with the host's clock on a CPU."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch

Instant = Any
"""A time of the host in seconds, or a CUDA event."""


def now(cuda: bool) -> Instant:
    """Record the current time on the current stream without waiting; `cuda`: the current CUDA device, else the host."""
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(start: Instant, end: Instant) -> float:
    """Return the seconds between two `now` results, waiting for the device to reach the second.

    >>> start = now(cuda=False)
    >>> 0.0 <= seconds_between(start, now(cuda=False)) < 60.0
    True
    """
    if isinstance(end, float):
        return end - start
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


Interval = tuple[str, Instant, Instant]
"""Name, begin and end of a timed block."""


class Timed:
    """Context manager that appends the name, begin and end of a block to a list; `cuda` as in `now`.

    >>> intervals: list[Interval] = []
    >>> for _ in range(2):
    ...     with Timed("load", intervals, cuda=False):
    ...         pass
    >>> len(intervals), list(add_up(intervals, {}))
    (2, ['load'])
    """

    __slots__ = ("_begun", "_cuda", "_into", "_name")  # because each collective of a step creates one

    def __init__(self, name: str, into: list[Interval], cuda: bool) -> None:
        self._name, self._into, self._cuda = name, into, cuda

    def __enter__(self) -> None:
        self._begun = now(self._cuda)

    def __exit__(self, *_: object) -> None:
        self._into.append((self._name, self._begun, now(self._cuda)))


def add_up(intervals: Iterable[Interval], sums: dict[str, float]) -> dict[str, float]:
    """Add the seconds of intervals to `sums` by name, waiting for the device; return `sums`."""
    for name, begun, ended in intervals:
        sums[name] = sums.get(name, 0.0) + seconds_between(begun, ended)
    return sums
