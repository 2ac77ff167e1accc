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
from shardwise.errors import ConflictError
from shardwise.memory import Category, Tier
from shardwise.optim import AdamW, OnebitAdam
from shardwise.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)
from tests.harness import on_ranks, run_ranks, thorough
from tests.harness.training import (
    Outcome,
    Setting,
    assert_identical,
    bits,
    engine_of,
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
        settings = [setting.with_stage(setting.stage, zero=(*setting.zero, *keys.items())) for keys in zero]
        return train_all(name, settings, 2)


ADAMW = Setting(accumulation=2, clip=0.5, optimizer="AdamW", lr=1e-2, precision="bf16")
PAIRS = (("mics_shard_size", 2),)
CODES = (("zero_hpz_partition_size", 2), ("zero_quantized_weights", True))
FEW = ("all on disk", "parameters on host")


@pytest.mark.parametrize(
    ("name", "world", "setting", "places", "far"),
    [
        ("gpt", 2, ADAMW.with_stage(2), FROM_STAGE_1, True),
        thorough("gpt", 2, ADAMW.with_stage(3), tuple(PLACES), True),
        thorough("gpt", 1, ADAMW.with_stage(3, precision="fp32", accumulation=1), tuple(PLACES), False),
        thorough("gpt", 4, ADAMW.with_stage(3, precision="fp16"), tuple(PLACES), False),
        thorough("gpt", 2, ADAMW.with_stage(1, precision="fp16", accumulation=1), FROM_STAGE_1, False),
        # Branches and shared parameters; groups of ranks; optimizers of whole tensors.
        ("router", 2, ADAMW.with_stage(3, precision="fp32", optimizer="momentum"), FEW, True),
        *(
            thorough(name, 2, ADAMW.with_stage(3, precision="fp32", optimizer="momentum"), FEW, True)
            for name in ("borrower", "mixed_types", "lora")
        ),
        ("gpt", 4, ADAMW.with_stage(3, zero=PAIRS, accumulation=1), FEW[:1], True),
        thorough("gpt", 4, ADAMW.with_stage(3, zero=PAIRS), FEW, True),
        thorough("gpt", 4, ADAMW.with_stage(3, zero=CODES), FEW, True),
        thorough("gpt_groups", 2, ADAMW.with_stage(1, optimizer="subclass"), FROM_STAGE_1, True),
        *(thorough("gpt_groups", 2, ADAMW.with_stage(3, optimizer=k), FEW, True) for k in ("Lamb", "Muon", "Lion")),
    ],
)
def test_the_same_bits(
    tmp_path: Path, name: str, world: int, setting: Setting, places: tuple[str, ...], far: bool
) -> None:
    zero = [offload(place, str(tmp_path)) for place in places]
    outcomes = ranks_agree(run_ranks(train_at, world, name, setting, [{}, *zero], far))
    for place, outcome in zip(places, outcomes[1:], strict=True):
        assert_identical(outcome, outcomes[0], place)
    assert not list(tmp_path.iterdir())


@on_ranks(2)
def test_single_tensors_are_read_and_set(tmp_path: Path) -> None:
    """Gradients, optimizer state and values, between passes and steps."""
    case, found = CASES["gpt"], []
    for zero in ({}, offload("all on disk", str(tmp_path))):
        engine = start(case, ADAMW.with_stage(3, accumulation=1, zero=tuple(zero.items())))
        weight = engine.module.get_parameter("blocks.1.up.weight")
        for step in range(2):
            engine.backward(case.loss(engine, case.data(step, 0, engine.global_rank, torch.bfloat16)))
            safe_set_full_grad(weight, 2 * safe_get_full_grad(weight))
            if step:
                state = safe_get_full_optimizer_state(weight, "exp_avg")
                safe_set_full_optimizer_state(weight, state + 0.25, "exp_avg")
            engine.step()
            safe_set_full_fp32_param(weight, safe_get_full_fp32_param(weight) + 0.125)
        found.append(bits(engine))
        engine.destroy()
    assert found[0] == found[1]


@on_ranks(1)
def test_an_optimizer_that_communicates_is_refused() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(ConflictError, match="elsewhere than on the device"):
        engine_of(model, 1, OnebitAdam(model.parameters(), lr=1e-3), zero={"offload_optimizer": {"device": "cpu"}})


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
    [("all on host", {Tier.HOST: OPTIMIZER + PARAMETERS}), ("optimizer on disk", {Tier.DISK: OPTIMIZER})],
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


@pytest.mark.parametrize("place", [p if p == "some parameters near" else thorough(p) for p in PLACES])
def test_plans_are_the_measurements_in_each_tier(tmp_path: Path, place: str) -> None:
    within = contextlib.nullcontext if place == "all on host" else played_device
    keys = {"stage": 3, "precision": "bf16", "keep": 0, "accumulation": 2, "zero": offload(place, str(tmp_path))}
    for before, after in run_ranks(reports.reported, 2, within, keys):
        reports.check(before, after, place)
        assert {row.name for row in before.elsewhere} >= ({"disk"} if "disk" in place else {"host"})


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


@on_ranks(2)
def test_an_overflow_is_explained_by_gradients_that_are_elsewhere(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    model.weight.register_hook(lambda gradient: gradient * torch.inf)
    with played_device():
        zero, fp16 = offload("optimizer on disk", str(tmp_path)), {"enabled": True}
        engine = engine_of(model, 2, torch.optim.AdamW(model.parameters()), zero=zero, fp16=fp16)
        engine.backward(engine(torch.ones(1, 4, dtype=torch.float16)).sum())
        engine.step()
        found = engine.last_step.overflow
        engine.destroy()
    assert found.parameter == "weight" and found.infinite == 8


def half_frozen() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    return model


def loaded(zero: dict[str, Any], directory: str, optimizer: bool) -> dict[str, torch.Tensor]:
    """Load weights three ways and change them in a block; return those of the last step."""
    engine = engine_of(half_frozen(), 3, {"type": "AdamW", "params": {"lr": 0.01}} if optimizer else None, zero=zero)

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
