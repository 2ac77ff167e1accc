"""Endless iteration, with and without epochs and positions."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler

from shardwise.data import EngineDataLoader, RepeatingLoader
from shardwise.errors import UsageError


def make(count: int = 7, drop_last: bool = False) -> EngineDataLoader:
    return EngineDataLoader(range(count), 2, rank=1, world_size=2, drop_last=drop_last, collate_fn=list)


def test_goes_through_the_epochs_of_the_loader() -> None:
    loader = make()
    epochs = [batch for _ in range(3) for batch in loader]
    repeating = RepeatingLoader(make())
    assert len(repeating) == 2
    assert iter(repeating) is repeating
    assert list(islice(repeating, 6)) == epochs


@given(count=st.integers(4, 20), drop_last=st.booleans(), stop=st.integers(0, 25))
def test_resumes(count: int, drop_last: bool, stop: int) -> None:
    expected = list(islice(RepeatingLoader(make(count, drop_last)), 30))
    early, late = (RepeatingLoader(make(count, drop_last)) for _ in range(2))
    seen = list(islice(early, stop))
    late.load_state_dict(early.state_dict())
    assert seen + list(islice(late, 30 - stop)) == expected
    # also into a loader that is in use
    early.load_state_dict(late.state_dict())
    assert next(early) == next(late)


def test_goes_on_from_a_position_that_the_loader_has_restored() -> None:
    expected = list(islice(RepeatingLoader(make()), 7))
    loader = make()
    repeating = RepeatingLoader(loader)
    assert list(islice(repeating, 3)) == expected[:3]
    state = loader.state_dict()
    next(repeating)
    loader.load_state_dict(state)
    assert list(islice(repeating, 4)) == expected[3:]


def test_reshuffles_a_distributed_sampler_of_a_plain_loader() -> None:
    sampler = DistributedSampler(range(8), num_replicas=2, rank=0)  # type: ignore[arg-type]
    expected = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        expected += list(sampler)
    sampler.set_epoch(0)
    repeating = RepeatingLoader(DataLoader(range(8), batch_size=None, sampler=sampler))  # type: ignore[arg-type]
    assert list(islice(repeating, 12)) == expected


def test_a_loader_without_batches_is_an_error() -> None:
    for loader in ([], iter([1])):
        repeating = RepeatingLoader(loader)
        list(islice(repeating, len(loader) if isinstance(loader, list) else 1))
        with pytest.raises(UsageError, match="gives no batches"):
            next(repeating)


def test_a_loader_without_position_is_an_error() -> None:
    with pytest.raises(UsageError, match="a list cannot tell its position"):
        RepeatingLoader([1]).state_dict()
