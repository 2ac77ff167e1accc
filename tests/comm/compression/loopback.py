"""Ranks as threads of this process: what a method of compression needs of a communicator, without processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch


class Loopback:
    """One rank's end. Collectives happen at launch; every rank must come to each."""

    device = torch.device("cpu")
    scratch: Sequence[torch.Tensor] = ()

    def __init__(self, rank: int, world: int, barrier: threading.Barrier, table: list[Any]) -> None:
        self.rank, self.world = rank, world
        self.given: list[torch.Tensor] = []  # what this rank has put into all-to-all and all-gather
        self._barrier, self._table = barrier, table

    def wait(self) -> None:
        pass

    def _exchange(self, value: Any) -> list[Any]:
        self._table[self.rank] = value
        self._barrier.wait()
        everybody = list(self._table)
        self._barrier.wait()
        return everybody

    def reduce_scatter(self, pairs: Any, label: str) -> Loopback:
        everybody = self._exchange([full.clone() for _, full in pairs])
        for number, (out, _) in enumerate(pairs):
            out.copy_(sum(fulls[number].view(self.world, -1)[self.rank] for fulls in everybody))
        return self

    def all_gather(self, pairs: Any, label: str, kind: str) -> Loopback:
        self.given += [shard.clone() for _, shard in pairs]
        everybody = self._exchange([shard.clone() for _, shard in pairs])
        for number, (full, _) in enumerate(pairs):
            full.copy_(torch.cat([shards[number] for shards in everybody]))
        return self

    def all_to_all(self, output: Any, given: Any, outputs: Any, inputs: Any, label: str, kind: str) -> Loopback:
        self.given.append(given.clone())
        everybody = self._exchange(given.split(list(inputs)))
        output.copy_(torch.cat([parts[self.rank] for parts in everybody]))
        return self


def on_threads(world: int, function: Callable[[Loopback], Any]) -> list[Any]:
    """Call a function on each of `world` ranks at once; return what they return."""
    barrier, table = threading.Barrier(world, timeout=60), [None] * world
    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(lambda rank: function(Loopback(rank, world, barrier, table)), range(world)))
