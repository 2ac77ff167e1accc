"""Threads for reading and hashing, both of which release the GIL."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")

_MOST = 4
"""Maximum number of threads of one rank; more would compete for memory and disk."""


def workers() -> int:
    """Return the number of threads of this rank: its share of the machine's cores, from 1 to 4."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, min(_MOST, cores // max(1, int(ranks) if ranks.isdigit() else 1)))


def for_each(function: Callable[[T], None], items: Sequence[T]) -> None:
    """Call a function for every item without gradients, with threads if there are cores.

    Raises the exception of the first item that fails.
    """
    function = torch.no_grad()(function)  # a thread does not inherit the mode
    count = min(workers(), len(items))
    if count <= 1:
        for item in items:
            function(item)
        return
    with ThreadPoolExecutor(count, thread_name_prefix="shardwise-read") as pool:
        for _ in pool.map(function, items):  # after an exception it cancels the others
            pass


def divided(items: Sequence[T]) -> list[Sequence[T]]:
    """Return items in as many consecutive runs as there are threads."""
    count = max(1, min(workers(), len(items)))
    return [items[len(items) * n // count : len(items) * (n + 1) // count] for n in range(count)]
