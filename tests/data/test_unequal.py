"""Unequal parts of the ranks in micro-batches: the samples of a micro-batch stay the same."""

from __future__ import annotations

from itertools import chain, islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.data import EngineDataLoader
from shardwise.data.unequal import divided_by_speed
from shardwise.errors import ConfigError, UsageError


def loaders(sizes: list[int], count: int = 50, workers: int = 0) -> list[EngineDataLoader]:
    world = len(sizes)
    return [
        EngineDataLoader(
            list(range(count)),
            sum(sizes) // world,
            rank=rank,
            world_size=world,
            collate_fn=list,
            drop_last=True,
            num_workers=workers,
            unequal=sizes,
        )
        for rank in range(world)
    ]


def rounds(of: list[EngineDataLoader], number: int | None = None) -> list[list[list[int]]]:
    """Return the batches of all ranks, by micro-batch."""
    return [list(batches) for batches in islice(zip(*of, strict=True), number)]


def flat(batches: list[list[int]]) -> list[int]:
    return list(chain.from_iterable(batches))


def joined(found: list[list[list[int]]]) -> list[list[int]]:
    return [flat(batches) for batches in found]


@pytest.mark.parametrize("workers", [0, 2])
def test_changes_divide_the_same_samples(workers: int) -> None:
    equal = joined(rounds(loaders([2, 2])))
    of = loaders([2, 2], workers=workers)
    iterators, found, sizes = [iter(loader) for loader in of], [], []
    for number in range(12):
        found.append([next(iterator) for iterator in iterators])
        sizes.append([loader.claim() for loader in of])
        if number in (1, 4):
            for loader in of:
                loader.divide([3, 1] if number == 1 else [1, 3])
    assert joined(found) == equal
    assert sizes == [[len(batch) for batch in batches] for batches in found]
    begun = (2, 5) if workers == 0 else (2 + 2 * workers, 5 + 2 * workers)
    assert sizes == [[2, 2]] * begun[0] + [[3, 1]] * (begun[1] - begun[0]) + [[1, 3]] * (12 - begun[1])
    assert [len(batches[0]) for batches in rounds(of)] == [1] * 12  # the next epoch begins with the newest parts


@pytest.mark.parametrize("stop", [0, 3, 12])
@pytest.mark.parametrize("other", [[3, 1], [2, 2], [1, 2, 1, 4], None])
def test_positions_resume_with_any_parts(other: list[int] | None, stop: int) -> None:
    whole = loaders([3, 1])
    expected = joined(rounds(whole))
    of = loaders([3, 1])
    iterators = [iter(loader) for loader in of]
    seen = [[next(iterator) for iterator in iterators] for _ in range(stop)]
    if other is None:  # equal micro-batches
        again = [
            EngineDataLoader(list(range(50)), 2, rank=rank, world_size=2, collate_fn=list, drop_last=True)
            for rank in range(2)
        ]
    else:
        again = loaders(other)
    for loader in again:
        loader.load_state_dict(of[0].state_dict())
    rest = joined(rounds(again)) if stop < 12 else []
    if other is not None and len(other) == 2:
        assert joined(seen) + rest == expected
        assert other == [3, 1] or again[0].parts == (3, 1)  # the saved parts go on
    else:
        all_seen = flat(joined(seen) + rest)
        assert len(set(all_seen)) == len(all_seen) >= 47 - len(rest[0] if rest else [])
        assert flat(joined(seen)) == flat(expected)[: 4 * stop]


def test_a_change_that_waits_for_workers_is_saved() -> None:
    of = loaders([2, 2], workers=1)
    iterators = [iter(loader) for loader in of]
    for iterator in iterators:
        next(iterator)
    for loader in of:
        loader.divide([3, 1])
    again = loaders([2, 2])
    for loader in again:
        loader.load_state_dict(of[0].state_dict())
    sizes = [len(batch) for batch in again[0]]
    assert sizes == [2, 2] + [3] * 9


def test_changes_that_are_over_are_not_saved() -> None:
    loader = loaders([2, 2])[0]
    for number, _ in enumerate(loader):
        loader.divide([3, 1] if number % 2 else [1, 3])
        assert len(loader.state_dict()["unequal"]) <= 2
    assert loader.state_dict()["unequal"] == [[0, [3, 1]]]


@given(
    speeds=st.lists(st.floats(0.01, 100.0), min_size=1, max_size=6),
    mean=st.integers(1, 8),
    most=st.integers(1, 16),
)
def test_no_other_division_is_ready_sooner(speeds: list[float], mean: int, most: int) -> None:
    total, most = mean * len(speeds), max(most, mean)
    sizes = divided_by_speed(total, speeds, most)
    assert sum(sizes) == total and min(sizes) >= 1 and max(sizes) <= most
    slowest = max(range(len(speeds)), key=lambda rank: sizes[rank] / speeds[rank])
    ready = sizes[slowest] / speeds[slowest]
    # No rank could take a sample of the slowest one and be ready sooner.
    others = [rank for rank in range(len(speeds)) if rank != slowest and sizes[rank] < most]
    assert sizes[slowest] == 1 or all((sizes[rank] + 1) / speeds[rank] >= ready * (1 - 1e-12) for rank in others)


def test_the_batch_of_a_backward_pass_must_be_known() -> None:
    loader = loaders([3, 1])[0]
    with pytest.raises(UsageError):
        loader.claim()
    batches = iter(loader)
    next(batches)
    assert loader.claim() == loader.claim() == 3
    next(batches), next(batches)
    with pytest.raises(UsageError):
        loader.claim()


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ([3, 2], {}),
        ([4, 0], {}),
        ([4], {}),
        ([3, 1], {"drop_last": False}),
        ([3, 1], {"blocks": True}),
        ([3, 1], {"data_sampler": range(50)}),
    ],
)
def test_parts_without_meaning(sizes: list[int], options: dict[str, Any]) -> None:
    options = {"drop_last": True, **options}
    with pytest.raises(ConfigError):
        EngineDataLoader(list(range(50)), 2, world_size=2, unequal=sizes, **options)
