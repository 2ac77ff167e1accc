"""Dataset wrappers inside torch's loader: rank shares of a stream, random seeds in workers.

Invariant: batch b of an epoch is the same whether the epoch was started at its beginning or resumed just before b.
Worker processes are therefore seeded for each batch, and replaying seen samples preserves the main process's RNG state,
which a checkpoint restores.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from types import FrameType
from typing import Any

import numpy
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

_FOR_RANKS = ("SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGXCPU")


def outlive_signals(worker_id: int = 0) -> None:
    """Ignore the first signal of each kind in a worker process; the `worker_init_fn` of a loader.

    Because schedulers signal all processes of a job, a worker would end, and its rank fail before it has saved.
    """
    seen: set[int] = set()

    def ignore_first(number: int, frame: FrameType | None) -> None:
        if number in seen:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        seen.add(number)

    for name in _FOR_RANKS:
        signal.signal(getattr(signal, name), ignore_first)


class Indices(list[int]):
    """Indices of one batch, with the random seed for fetching it in a worker process."""

    seed: int


class SeededDataset(Dataset[Any]):
    """A map-style dataset with random numbers that depend on the batch, not on the worker's history. Used in worker
    processes only, because in the main process random numbers belong to the user.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitems__(self, indices: Indices) -> Sequence[Any]:
        torch.manual_seed(indices.seed)
        random.seed(indices.seed)
        numpy.random.seed(indices.seed % 2**32)
        if callable(fetch := getattr(self.dataset, "__getitems__", None)):
            return fetch(list(indices))
        return [self.dataset[index] for index in indices]


class RankStream(IterableDataset[Any]):
    """Every world-th sample of a stream from `offset` on, equally many on each rank; `start` of them are skipped."""

    def __init__(self, dataset: Iterable[Any], rank: int, world_size: int, drop_last: bool) -> None:
        self.dataset = dataset
        self.rank = rank
        self.world_size = world_size
        self.drop_last = drop_last
        self.start = self.offset = 0

    def __iter__(self) -> Iterator[Any]:
        stream = iter(self.dataset)
        with replaying():
            for _ in islice(stream, self.offset + self.start * self.world_size):
                pass
        mine = last = None
        seen = 0
        for last in stream:
            if seen == self.rank:
                mine = last
            seen += 1
            if seen == self.world_size:
                # Now each rank is certain to have one.
                yield mine
                seen = 0
        if seen and not self.drop_last:
            yield mine if self.rank < seen else last


def replaying() -> AbstractContextManager[None]:
    """Return a context for reading seen samples again. In the main process it preserves the RNG state, which the
    checkpoint has restored. In a worker the RNG restarts in each epoch, and replaying advances it to the right state.
    """
    return nullcontext() if get_worker_info() is not None else _kept_random_states()


@contextmanager
def _kept_random_states() -> Iterator[None]:
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        numpy.random.set_state(states[2])


def mixed_seed(*numbers: int) -> int:
    """Return a seed (63 bits) that depends on each number and on their order."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
