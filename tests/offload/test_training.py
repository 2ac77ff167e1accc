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
from tests.harness import on_ranks, run_ranks, thorough
from tests.harness.training import (
    Outcome,
    Setting,
    assert_identical,
    digest,
    masters,
    ranks_agree,
    start,
    take_steps,
    train_all,
)
from tests.memory import test_report as reports
from tests.models import CASES
from tests.offload.settings import FROM_STAGE_1, PLACES, offload, played_device


def train_at(name: str, setting: Setting, zero: Sequence[dict[str, Any]], far: bool) -> list[Outcome]:
    with played_device() if far else contextlib.nullcontext():
        return train_all(name, [setting.with_stage(setting.stage, zero=tuple(keys.items())) for keys in zero])


@pytest.mark.parametrize(
    ("world", "precision", "stage", "accumulation", "far"),
    [
        (2, "bf16", 2, 2, True),
        thorough(2, "bf16", 3, 2, True),
        thorough(1, "fp32", 3, 1, False),
        thorough(4, "fp16", 3, 2, False),
        thorough(2, "fp16", 1, 1, False),
    ],
)
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
    take_steps(engine, case, range(2), rank=0)
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


@pytest.mark.parametrize("place", [p if p == "some parameters near" else thorough(p) for p in PLACES])
def test_plans_are_the_measurements_in_each_tier(tmp_path: Path, place: str) -> None:
    far = place != "all on host"
    for before, after in run_ranks(reported, 2, offload(place, str(tmp_path)), 3, 2, far):
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
            take_steps(engine, case, range(3), rank=0)
            stepped = masters(model)
            for name, parameter in model.named_parameters():
                assert torch.equal(parameter.float(), stepped[name]), name
            found.append(digest(list(stepped.values())))
            engine.destroy()
    assert len(set(found)) == 1


@pytest.mark.parametrize(("rounding", "far"), [("stochastic", True), thorough("kahan", False)])
def test_the_same_bits_without_masters(tmp_path: Path, rounding: str, far: bool) -> None:
    places = [{}, *(offload(place, str(tmp_path)) for place in FROM_STAGE_1)]
    run_ranks(rounded, 2, rounding, places, far)


def shared(
    zero: dict[str, Any], path: str, writes: bool, far: bool
) -> tuple[Outcome, dict[Category, int], dict[Category, int]]:
    """Train without masters: values are written by the script and loaded from a checkpoint on the way."""
    case, extra = CASES["gpt"], (("bf16", {"enabled": True, "master_weights": "none", "rounding": "stochastic"}),)
    setting = Setting(3, precision="bf16", zero=tuple(zero.items()), extra=extra, clip=0.5)
    with played_device() if far else contextlib.nullcontext():
        model = case.make()
        engine = start(case, setting, model, AdamW(case.groups(model), lr=1e-2))
        losses: list[float] = []

        def train(steps: range) -> None:
            for step in steps:
                loss = case.loss(engine, case.data(step, 0, engine.sharded.comm.rank, torch.bfloat16))
                engine.backward(loss)
                losses.append(float(loss.detach()))
                engine.step()

        train(range(2))
        if writes:
            engine.save_checkpoint(path)
            train(range(2, 4))
            engine.load_checkpoint(path)
            first = next(iter(model.parameters()))
            with shardwise.zero.GatheredParameters([first], modifier_rank=0):
                first.data.mul_(0.5)
        train(range(4, 6))
        report = engine.memory_report()  # before `masters` fetches all state at once
        found = Outcome(masters(model), losses=losses)
        held = {tier: engine.accountant.live_in(tier) for tier in Tier}
        for row in report.elsewhere:
            assert writes or reports.close(row.planned, row.measured), row
        engine.destroy()
    return found, held[Tier.DEVICE], held[Tier.HOST]


@pytest.mark.parametrize(("optimizer", "writes", "far"), [("nvme", True, True), thorough("cpu", False, False)])
def test_without_masters_the_host_steps_what_it_lends(tmp_path: Path, optimizer: str, writes: bool, far: bool) -> None:
    zero = {
        "offload_optimizer": {"device": optimizer, "nvme_path": str(tmp_path / "swap")},
        "offload_param": {"device": "cpu"},
    }
    resident = run_ranks(shared, 2, {}, str(tmp_path / "a"), writes, far)
    away = run_ranks(shared, 2, zero, str(tmp_path / "b"), writes, far)
    for (expected, on_device, _), (found, _, on_host) in zip(resident, away, strict=True):
        assert_identical(found, expected, optimizer)
        # One copy of the parameters, and none on the device between uses.
        assert on_host[Category.PARAMETERS] <= on_device[Category.PARAMETERS] + 200
        assert on_host[Category.MASTER] == 0


class Spoilt(nn.Module):
    """A layer whose weight's gradient is infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.layer.weight.register_hook(lambda gradient: gradient * torch.inf)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


@on_ranks(2)
def test_an_overflow_is_explained_by_gradients_that_are_elsewhere(tmp_path: Path) -> None:
    zero = {"stage": 2, **offload("optimizer on disk", str(tmp_path))}
    with played_device():
        config = {"train_micro_batch_size_per_gpu": 1, "fp16": {"enabled": True}, "zero_optimization": zero}
        model = Spoilt()
        engine, *_ = shardwise.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)
        engine.backward(engine(torch.ones(1, 4, dtype=torch.float16)).sum())
        engine.step()
        found = engine.last_step.overflow
        engine.destroy()
    assert found.parameter == "layer.weight" and found.infinite == 8


def half_frozen() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    return model


def loaded(zero: dict[str, Any], directory: str, optimizer: bool) -> dict[str, torch.Tensor]:
    """Load weights three ways and change them in a block; return those of the last step."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **zero},
    }
    if optimizer:
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.01}}
    engine = shardwise.initialize(model=half_frozen(), config=config)[0]

    def step(number: int) -> None:
        if optimizer:
            engine.backward(engine(torch.arange(8.0).view(2, 4) * number).square().mean())
            engine.step()

    step(1)
    saved = engine.module_state_dict()
    engine.save_checkpoint(directory)
    engine.export(f"{directory}/weights", overwrite=True)
    step(2)
    engine.load_module_state_dict(saved)
    step(3)
    engine.load_weights(f"{directory}/weights")
    step(4)
    engine.load_checkpoint(directory)
    with torch.no_grad(), shardwise.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=1):
        for parameter in engine.module.parameters():
            parameter.mul_(1.5)
    step(5)
    found = engine.module_state_dict()
    engine.destroy()
    return found


def test_weights_are_loaded_into_units_with_frozen_and_trained_parameters(tmp_path: Path) -> None:
    place = {"device": "cpu"}
    for optimizer in (True, False):
        expected, *others = run_ranks(loaded, 2, {}, str(tmp_path), optimizer)
        for zero in ({"offload_optimizer": place, "offload_param": place}, {"offload_param": place}):
            for found in (*others, *run_ranks(loaded, 2, zero, str(tmp_path), optimizer)):
                assert all(torch.equal(value, found[name]) for name, value in expected.items()), zero
