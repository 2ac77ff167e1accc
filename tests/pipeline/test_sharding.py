"""Pipelines with ZeRO: each pass unshards and reduces the units of one stage, whatever else is on the rank."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.memory import Category
from shardwise.pipe import LayerSpec
from tests.harness import run_ranks
from tests.pipeline.training import MICRO_BATCHES, WORDS, Block, Setting, data, engine_of, train_all

WIDTH = 256


def wide() -> list[Any]:
    """Return layers that are large enough to be sharded: each block is a unit."""
    blocks = [LayerSpec(Block, WIDTH) for _ in range(8)]
    return [LayerSpec(nn.Embedding, WORDS, WIDTH), *blocks, LayerSpec(nn.Linear, WIDTH, WORDS, bias=False)]


def measure(setting: Setting) -> tuple[Counter[str], list[int], int, dict[Category, int]]:
    """Return the collectives of a step by kind, bytes of the units, late unshards, and peaks of memory."""
    engine = engine_of(setting)
    for step in range(2):
        engine.train_batch(data(setting, step))
    first, accountant = engine.ledger.sequence, engine.sharded.accountant
    accountant.reset_peak()
    engine.train_batch(data(setting, 2))
    kinds = Counter(record.kind for record in engine.ledger.records(since=first))
    sizes = [sum(section.layout.numel * 4 for section in unit.sections) for unit in engine.sharded.units]
    late, peaks = engine.sharded.unsharder.late, dict(accountant.peak)
    engine.destroy()
    return kinds, sizes, late, peaks


def case(schedule: str, zero: int, *marks: Any) -> Any:
    """Return the case of a schedule and ZeRO stage."""
    chunks = {"pipeline": {"chunks": 2}} if schedule == "interleaved" else {}
    return pytest.param(Setting(2, schedule, zero, made=wide, config=chunks), id=f"{schedule}-{zero}", marks=marks)


@pytest.mark.parametrize(
    "setting",
    [
        case("zbv", 3),
        *(case(schedule, 3, pytest.mark.thorough) for schedule in ("1f1b", "interleaved")),
        case("zbv", 1, pytest.mark.thorough),
        case("1f1b", 2, pytest.mark.thorough),
    ],
)
def test_each_unit_is_unsharded_twice_and_reduced_once_a_micro_batch(setting: Setting) -> None:
    for kinds, sizes, late, peaks in run_ranks(measure, 4, setting):
        units, passes = len(sizes), MICRO_BATCHES if setting.zero > 1 else 1
        assert late == 0
        assert kinds["reduce"] == passes * units
        if setting.zero == 3:
            # The first unit of the backward pass may be kept from the forward pass.
            assert 2 * passes * (units - 1) <= kinds["gather"] <= 2 * passes * units
            # A rank may have one unit more for peers that are ahead.
            assert peaks[Category.GATHERED] <= 3 * max(sizes)
        else:
            assert kinds["gather"] == units
        assert peaks[Category.BUFFERS] <= 5 * max(sizes)


@pytest.mark.parametrize("schedule", ["zbv", pytest.param("interleaved", marks=pytest.mark.thorough)])
def test_units_may_stay_unsharded_over_several_passes(schedule: str) -> None:
    step, run, each = (
        Setting(2, schedule, 3, made=wide, config={"pipeline": {"unsharded_for": value, "chunks": 2}})
        for value in ("step", "run", "pass")
    )
    for kinds, sizes, late, peaks in run_ranks(measure, 4, step):
        assert late == 0
        assert kinds["gather"] == len(sizes)
        assert kinds["reduce"] == MICRO_BATCHES * len(sizes)
        assert peaks[Category.GATHERED] == sum(sizes)
    for kinds, sizes, late, peaks in run_ranks(measure, 4, run):
        assert late == 0
        assert len(sizes) < kinds["gather"] < 2 * MICRO_BATCHES * (len(sizes) - 1)
        assert peaks[Category.GATHERED] < sum(sizes)
    for runs in run_ranks(train_all, 4, [step, run, each]):
        for one in runs[:2]:
            assert one.losses == runs[2].losses
            assert all(torch.equal(one.parameters[name], runs[2].parameters[name]) for name in one.parameters)
