"""Each rank's samples: the order of torch's sampler, whole epochs, any starting place."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from shardwise.data import ResumableDistributedSampler
from shardwise.errors import ConfigError

SIZES = {
    "count": st.integers(1, 40),
    "world": st.integers(1, 6),
    "shuffle": st.booleans(),
    "drop_last": st.booleans(),
    "seed": st.integers(0, 5),
    "epoch": st.integers(0, 3),
}


@given(**SIZES, start=st.integers(0, 45))
def test_equals_torch_from_any_start(
    count: int, world: int, shuffle: bool, drop_last: bool, seed: int, epoch: int, start: int
) -> None:
    for rank in range(world):
        ours = ResumableDistributedSampler(
            range(count), rank=rank, world_size=world, shuffle=shuffle, seed=seed, drop_last=drop_last
        )
        theirs = DistributedSampler(
            range(count),  # type: ignore[arg-type]
            num_replicas=world,
            rank=rank,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
        )
        theirs.set_epoch(epoch)
        ours.set_epoch(epoch, start)
        assert len(ours) == len(theirs)
        assert list(ours) == list(theirs)[start:]


def test_rank_outside_the_world() -> None:
    with pytest.raises(ConfigError, match=r"rank 2 is not in a world of 2 ranks \(0 to 1\)"):
        ResumableDistributedSampler(range(4), rank=2, world_size=2)


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_default_device_has_no_say(shuffle: bool) -> None:
    expected = list(ResumableDistributedSampler(range(10), shuffle=shuffle))
    with torch.device("meta"):
        assert list(ResumableDistributedSampler(range(10), shuffle=shuffle)) == expected


def test_the_global_random_state_is_left_alone() -> None:
    before = torch.get_rng_state()
    list(ResumableDistributedSampler(range(10)))
    assert torch.equal(before, torch.get_rng_state())
