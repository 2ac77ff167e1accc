"""State on the host and on disks: the same bits as on the device, and less there."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise
from shardwise.memory import Category, Tier
from shardwise.optim import AdamW
from shardwise.precision import OverflowReport
from tests.harness import run_ranks
from tests.memory import test_report as reports
from tests.models import CASES
from tests.offload.settings import FROM_STAGE_1, PLACES, offload, played_device
from tests.zero.training import (
    Outcome,
    Setting,
    assert_identical,
    digest,
    masters,
    ranks_agree,
    start,
    train_all,
)


def train_at(name: str, setting: Setting, zero: Sequence[dict[str, Any]], far: bool) -> list[Outcome]:
    with played_device() if far else contextlib.nullcontext():
        return train_all(name, [setting.with_stage(setting.stage, zero=tuple(keys.items())) for keys in zero])


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("far", [False, True], ids=["cpu", "device"])
def test_the_same_bits(tmp_path: Path, world: int, precision: str, stage: int, accumulation: int, far: bool) -> None:
    setting = Setting(stage, precision=precision, accumulation=accumulation, clip=0.5, optimizer="AdamW", lr=1e-2)
    places = tuple(PLACES) if stage == 3 else FROM_STAGE_1
    zero = [offload(place, str(tmp_path)) for place in places]
    outcomes = ranks_agree(run_ranks(train_at, world, "gpt", setting, [{}, *zero], far))
    for name, outcome in zip(places, outcomes[1:], strict=True):
        assert_identical(outcome, outcomes[0], name)
    assert not list(tmp_path.iterdir())


def held(zero: dict[str, Any]) -> dict[Tier, dict[Category, int]]:
    case = CASES["gpt"]
    engine = start(case, Setting(3, precision="bf16", optimizer="AdamW", zero=tuple(zero.items())))
    for step in range(2):
        engine.backward(case.loss(engine, case.data(step, 0, 0, torch.bfloat16)))
        engine.step()
    found = {tier: engine.accountant.live_in(tier) for tier in Tier}
    engine.destroy()
    for tier in (Tier.HOST, Tier.DISK):
        assert not any(engine.accountant.live_in(tier).values())
    return found


OPTIMIZER, PARAMETERS = (Category.MASTER, Category.OPTIMIZER), (Category.PARAMETERS,)


@pytest.mark.parametrize(
    ("place", "tiers"),
    [
        ("optimizer on host", {Tier.HOST: OPTIMIZER}),
        ("optimizer on disk", {Tier.DISK: OPTIMIZER}),
        ("parameters on host", {Tier.HOST: PARAMETERS}),
        ("all on host", {Tier.HOST: OPTIMIZER + PARAMETERS}),
        ("all on disk", {Tier.DISK: OPTIMIZER + PARAMETERS}),
    ],
)
def test_what_is_elsewhere_is_not_on_the_device(
    tmp_path: Path, place: str, tiers: dict[Tier, tuple[Category, ...]]
) -> None:
    (resident,), (away,) = (run_ranks(held, 1, zero) for zero in ({}, offload(place, str(tmp_path))))
    for tier, categories in tiers.items():
        for category in categories:
            whole = resident[Tier.DEVICE][category]
            others = sum(away[other][category] for other in Tier if other is not tier)
            assert others < 0.02 * whole + 200, category  # counts of steps
            assert away[tier][category] >= 0.98 * whole - 200, category


def reported(zero: dict[str, Any], stage: int, accumulation: int, far: bool) -> Any:
    with played_device() if far else contextlib.nullcontext():
        before, after = reports.report(stage, "bf16", keep=0, accumulation=accumulation, zero=zero)
    reports.check(before, after, f"stage {stage}")
    return before.elsewhere, after.elsewhere


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("far", [False, True], ids=["cpu", "device"])
@pytest.mark.parametrize(
    ("place", "stage"), [*((place, 1) for place in FROM_STAGE_1), *((place, 3) for place in PLACES)]
)
def test_plans_are_the_measurements_in_each_tier(
    tmp_path: Path, place: str, stage: int, accumulation: int, far: bool
) -> None:
    for before, after in run_ranks(reported, 2, offload(place, str(tmp_path)), stage, accumulation, far):
        assert [row.name for row in before] == [row.name for row in after]
        assert {row.name for row in before} >= ({"disk"} if "disk" in place else {"host"})
        for planned, measured in zip(before, after, strict=True):
            assert reports.close(planned.planned, measured.measured), planned.name


def rounded(rounding: str, places: Sequence[dict[str, Any]], far: bool) -> None:
    """Without fp32 masters what the host has stepped is, bit for bit, what the device computes with."""
    extra = (("bf16", {"enabled": True, "master_weights": "none", "rounding": rounding}),)
    found = []
    for zero in places:
        with played_device() if far else contextlib.nullcontext():
            case = CASES["gpt"]
            model = case.make()
            setting = Setting(2, precision="bf16", zero=tuple(zero.items()), extra=extra)
            engine = start(case, setting, model, AdamW(case.groups(model), lr=1e-2))
            for step in range(3):
                engine.backward(case.loss(engine, case.data(step, 0, 0, torch.bfloat16)))
                engine.step()
            stepped = masters(model)
            for name, parameter in model.named_parameters():
                assert torch.equal(parameter.float(), stepped[name]), name
            found.append(digest(list(stepped.values())))
            engine.destroy()
    assert len(set(found)) == 1


@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "kahan"])
@pytest.mark.parametrize("far", [False, True], ids=["cpu", "device"])
def test_the_same_bits_without_masters(tmp_path: Path, rounding: str, far: bool) -> None:
    places = [{}, *(offload(place, str(tmp_path)) for place in FROM_STAGE_1)]
    run_ranks(rounded, 2, rounding, places, far)


class Spoilt(nn.Module):
    """A layer whose weight's gradient is infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.layer.weight.register_hook(lambda gradient: gradient * torch.inf)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def skipped(zero: dict[str, Any]) -> OverflowReport | None:
    with played_device():
        config = {"train_micro_batch_size_per_gpu": 1, "fp16": {"enabled": True}, "zero_optimization": zero}
        model = Spoilt()
        engine, *_ = shardwise.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)
        engine.backward(engine(torch.ones(1, 4, dtype=torch.float16)).sum())
        engine.step()
        found = engine.last_step.overflow
        engine.destroy()
    return found


@pytest.mark.parametrize("place", ["optimizer on host", "optimizer on disk"])
def test_an_overflow_is_explained_by_gradients_that_are_elsewhere(tmp_path: Path, place: str) -> None:
    for found in run_ranks(skipped, 2, {"stage": 2, **offload(place, str(tmp_path))}):
        assert found.parameter == "layer.weight" and found.infinite == 8
