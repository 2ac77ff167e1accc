"""Times of what runs on a device: on a CUDA device those of its events, on a CPU those of the clock."""

from __future__ import annotations

import time
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
