"""Ranks that run blocks in orders and numbers of their own do not wait for each other, and train as one process."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.device import checking
from tests.device.recorded import record, record_all
from tests.device.test_recording import ordered_by
from tests.harness import on_ranks, thorough
from tests.harness.training import Setting, assert_close, plain, train
from tests.models import Case
from tests.zero.blocks import Blocks, drawn

STEPS = 3


@pytest.mark.parametrize(
    ("world", "first", "count"),
    [(2, 0, 4), thorough(2, 4, 102), thorough(3, 1000, 60)],
)
@on_ranks("world", timeout=300)
def test_ranks_that_meet_blocks_at_other_times_train_as_one_process(world: int, first: int, count: int) -> None:
    rescues = 0
    for number in range(first, first + count):
        case, setting = drawn(number, stage=3)
        outcome = train(case, setting, STEPS)
        assert_close(outcome.masters, plain(case, setting, world, STEPS).masters, 1e-5, f"blocks {number}")
        rescues += outcome.rescues[-1]
    assert rescues > count or dist.get_rank()


def problems(number: int, world: int, who: str, zero: tuple[tuple[str, Any], ...]) -> list[str]:
    case, setting = drawn(number)
    setting = replace(setting, zero=setting.zero + zero, **({"stage": 3} if zero else {}))

    def loss(engine: Any, micro: int, rank: int) -> torch.Tensor:
        given = case.data(micro // setting.accumulation, micro % setting.accumulation, rank, torch.float32)
        return case.loss(engine, given)

    with ordered_by(who):
        return [str(found) for found in checking.check(record_all(case, setting, world=world, loss=loss))]


GROUPS = {"all": (2, ()), "hsdp": (4, (("mics_shard_size", 2),)), "hpz": (4, (("zero_hpz_partition_size", 2),))}


@pytest.mark.parametrize(("groups", "who"), [("all", "device"), thorough("hsdp", "device"), ("hpz", "host")])
def test_streams_are_in_order_whatever_blocks_ranks_call(groups: str, who: str) -> None:
    """A rank of this schedule also fetches units whose gathers it has launched ahead."""
    assert problems(3, GROUPS[groups][0], who, GROUPS[groups][1]) == []


def half(engine: Any, micro: int, rank: int) -> torch.Tensor:
    """From the second step on the block that is reduced last is not called."""
    given = TWO.data(micro, 0, rank, torch.float32)
    return TWO.loss(engine, {**given, "plan": [(index, "plain") for index in ((0, 1) if micro < 2 else (1,))]})


TWO = Case("two blocks", lambda: Blocks(random.Random(0), 2), drawn(0)[0].batch, drawn(0)[0].loss)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_unit_without_gradients_does_not_take_memory_that_a_reduction_reads(stage: int) -> None:
    """The reduction before it ends first, because two such units are much of the model."""
    setting = Setting(stage, accumulation=2, zero=(("reduce_bucket_size", 300),))
    with ordered_by("device"):
        assert checking.check_order(record(TWO, setting, 0, world=2, loss=half)) == []


@pytest.mark.thorough
@pytest.mark.parametrize("number", range(100, 140))
def test_many_schedules_are_in_order(number: int) -> None:
    world, zero = GROUPS[list(GROUPS)[number % 3]]
    assert problems(number, world, "device", zero) == []
    assert problems(number, world, "host", zero) == []
