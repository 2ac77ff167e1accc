"""Threads that read and hash: both leave Python's lock alone, so that several of them use several cores."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

_MOST = 4
"""More threads of one rank than this only compete for the memory and the disk."""


def workers() -> int:
    """Return how many threads this rank may use: its part of the machine's cores, at least 1 and at most 4."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, min(_MOST, cores // max(1, int(ranks) if ranks.isdigit() else 1)))


def for_each(function: Callable[[T], None], items: Sequence[T]) -> None:
    """Call a function for every item, by several threads if there are cores for them.

    Raises:
        Exception: what the function raised, for the first item for which it did.
    """
    count = min(workers(), len(items))
    if count <= 1:
        for item in items:
            function(item)
        return
    with ThreadPoolExecutor(count, thread_name_prefix="shardwise-read") as pool:
        running = [pool.submit(function, item) for item in items]
        try:
            for one in running:
                one.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def divided(items: Sequence[T]) -> list[Sequence[T]]:
    """Return items in as many runs of neighbours as there are threads."""
    count = max(1, min(workers(), len(items)))
    return [items[len(items) * n // count : len(items) * (n + 1) // count] for n in range(count)]
