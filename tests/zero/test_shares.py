"""Which rank gets which tensors and elements: found without going through all ranks."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardwise.zero.units.layout import FlatParam, ParamSlot
from shardwise.zero.units.quantized_weights import Exact
from shardwise.zero.updates.owner_sharded import owners

RANKS = 4096


def calls_of(function: Callable[..., Any], *arguments: Any) -> tuple[Any, int]:
    """Return a result, and how many functions have been called for it."""
    counter = itertools.count()
    sys.setprofile(lambda _frame, event, _argument: next(counter) if event.endswith("call") else None)
    try:
        found = function(*arguments)
    finally:
        sys.setprofile(None)
    return found, next(counter)


def least_loaded(costs: Sequence[float], world: int, among: Mapping[int, Sequence[int]]) -> list[int]:
    load, found = [0.0] * world, [0] * len(costs)
    for place in sorted(range(len(costs)), key=lambda place: (-costs[place], place)):
        found[place] = min(among.get(place, range(world)), key=lambda rank: (load[rank], rank))
        load[found[place]] += costs[place]
    return found


def test_owners_are_the_least_loaded_ranks() -> None:
    choose = random.Random(1)
    for world in (1, 2, 5, 9):
        for count in (0, 3, 40):
            costs = [choose.choice([0.0, 1.0, 2.5, choose.random()]) for _ in range(count)]
            among = {place: choose.sample(range(world), choose.randint(1, world)) for place in range(0, count, 3)}
            for some in ({}, among):
                assert owners(costs, world, some) == least_loaded(costs, world, some)
    found, calls = calls_of(owners, [1.0] * 4000, RANKS)
    assert found == list(range(4000)) and calls < 5 * (4000 + RANKS)


def test_elements_that_travel_exactly() -> None:
    """A matrix and a vector that lies on a few ranks."""
    slots = (ParamSlot(0, 0, 5 * RANKS), ParamSlot(1, 5 * RANKS + 3, 20), ParamSlot(2, 6 * RANKS, RANKS))
    layout = FlatParam(torch.float32, True, slots, (), 8 * RANKS, (RANKS,))
    part, calls = calls_of(Exact.of, layout, lambda index: index == 1)
    assert part.runs == {2560: [(3, 5)], 2561: [(0, 8)], 2562: [(0, 7)]} and part.most == 8
    assert calls < 100
    assert len(part.of_range(torch.zeros(8), 2561)) == 1
