"""Averages of blocks: exact means, and the order of the collectives of several blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from shardwise.comm.compression.averaging import BlockMean, ExactMean, average
from tests.comm.compression.loopback import Loopback, on_threads


def test_exact_means_are_the_same_on_all_ranks() -> None:
    def run(comm: Loopback) -> tuple[list[torch.Tensor], int]:
        values = [torch.arange(6.0) + comm.rank, torch.full((3,), float(2**comm.rank))]
        held: list[torch.Tensor] = []
        link: Any = comm
        average([ExactMean(link, "first"), ExactMean(link, "second")], values, held.append)
        return values, sum(tensor.numel() for tensor in {id(tensor): tensor for tensor in held}.values())

    for (first, second), held in on_threads(3, run):
        assert torch.equal(first, torch.arange(6.0) + 1)
        assert torch.equal(second, torch.full((3,), 7.0 / 3))
        assert held == 2 + 1  # one range of each block


class Recorded(BlockMean):
    """Records its parts."""

    def __init__(self, name: str, parts: list[str], launches: int) -> None:
        super().__init__()
        self.name, self.parts, self.launches = name, parts, launches

    def average(self, values: torch.Tensor) -> Iterator[Sequence[torch.Tensor]]:
        for number in range(self.launches):
            self.parts.append(f"{self.name}{number}")
            yield ()
        self.parts.append(f"{self.name} done")


def test_each_part_runs_for_all_blocks_in_order() -> None:
    parts: list[str] = []
    means = [Recorded(name, parts, launches) for name, launches in (("a", 2), ("b", 1), ("c", 2))]
    average(means, [torch.zeros(1)] * 3, lambda _: None)
    assert parts == ["a0", "b0", "c0", "a1", "b done", "c1", "a done", "c done"]
