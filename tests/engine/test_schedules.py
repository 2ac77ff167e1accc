"""Schedules in the engine: rate and momentum of every update, skipped updates, resuming at any step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.errors import UsageError
from shardwise.schedules import OneCycle, names
from tests.harness import on_ranks, thorough
from tests.harness.training import SGD, config_of, engine_of, goes_on

PARAMS: dict[str, dict[str, Any]] = {
    "LRRangeTest": {"lr_range_test_step_size": 3},
    "OneCycle": {
        "cycle_min_lr": 0.01,
        "cycle_max_lr": 0.1,
        "cycle_first_step_size": 3,
        "cycle_second_step_size": 2,
        "decay_step_size": 2,
        "decay_lr_rate": 0.5,
        "decay_mom_rate": 0.01,
    },
    "WarmupLR": {"warmup_num_steps": 5},
    "WarmupDecayLR": {"total_num_steps": 9, "warmup_num_steps": 3},
    "WarmupCosineLR": {"total_num_steps": 9, "warmup_num_steps": 3},
    "StepLR": {"step_size": 2},
    "MultiStepLR": {"milestones": [2, 5]},
    "ConstantLR": {"total_iters": 4},
    "LinearLR": {"total_iters": 6},
    "ExponentialLR": {"gamma": 0.9},
    "CosineAnnealingLR": {"T_max": 6},
    "CosineAnnealingWarmRestarts": {"T_0": 3},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 3},
    "OneCycleLR": {"max_lr": 0.1, "total_steps": 14},
    "PolynomialLR": {"total_iters": 6},
}
"""Every schedule that a configuration can name, so that something happens in the first nine updates."""


def scheduled(schedule: str, optimizer: str = "AdamW", stage: int = 0, **more: Any) -> Any:
    torch.manual_seed(3)
    section = {"type": optimizer, "params": {"lr": 0.05, "weight_decay": 0.01}}
    return engine_of(nn.Linear(5, 3), stage, section, scheduler={"type": schedule, "params": PARAMS[schedule]}, **more)


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(2, 5, generator=torch.Generator().manual_seed(100 * step + rank))


def in_force(group: dict[str, Any]) -> tuple[float, Any]:
    return float(group["lr"]), group.get("betas", group.get("momentum"))


def train(engine: Any, first: int, last: int) -> list[tuple[float, Any]]:
    """Rate and momentum of updates `first` to `last` - 1."""
    used = []
    for step in range(first, last):
        engine.backward(engine(batch(step, dist.get_rank())).square().mean())
        used.append(in_force(engine.optimizer.param_groups[0]))
        engine.step()
    return used


def whole(engine: Any) -> list[torch.Tensor]:
    with shardwise.zero.GatheredParameters(list(engine.module.parameters())):
        found = [p.detach().clone() for p in engine.module.parameters()]
    engine.destroy()
    return found


@pytest.mark.parametrize("name", [*names()[:4], *map(thorough, names()[4:])])
@on_ranks(1)
def test_every_schedule_resumes_from_a_checkpoint(name: str, tmp_path: Path) -> None:
    used: list[tuple[float, Any]] = []

    def begin(again: bool) -> Any:
        engine = scheduled(name, *(("AdamW", 2), ("SGD", 0))[names().index(name) % 2])
        if again:
            train(engine, 0, 2)
        return engine

    goes_on(begin, lambda *given: used.extend(train(*given)), tmp_path, 4, 9)
    assert used[4:9] == used[9:]


@pytest.mark.parametrize("name", ["CosineAnnealingLR", "OneCycleLR", "OneCycle"])
@on_ranks(1)
def test_rates_after_a_load_are_those_of_the_schedule_in_force(name: str, tmp_path: Path) -> None:
    """Of the new schedule if groups are loaded without it, of the loaded one if groups are not."""
    source = scheduled(name)
    train(source, 0, 4)
    source.save_checkpoint(tmp_path)
    begun = scheduled(name)
    begun.load_checkpoint(tmp_path, load_lr_scheduler_states=False)
    assert begun.global_steps == 4
    fresh = [rate for rate, _ in train(scheduled(name), 4, 7)]
    assert [rate for rate, _ in train(begun, 4, 7)] == fresh
    for options in ({"load_optimizer_states": False}, {"load_param_groups": False}):
        loaded = scheduled(name)
        loaded.load_checkpoint(tmp_path, **options)
        assert loaded.lr_scheduler.last_epoch == 4
        assert loaded.optimizer.param_groups[0]["lr"] == source.optimizer.param_groups[0]["lr"] != fresh[0]


@on_ranks(1)
def test_a_schedule_that_the_script_loads_goes_on_at_its_rate(tmp_path: Path) -> None:
    source = scheduled("CosineAnnealingLR", "SGD")
    train(source, 0, 3)
    source.save_checkpoint(tmp_path, client_state={"schedule": source.lr_scheduler.state_dict()})
    own = train(source, 3, 6)
    restored = scheduled("CosineAnnealingLR", "SGD")
    rate = restored.optimizer.param_groups[0]["lr"] = torch.tensor(0.05, dtype=torch.float64)
    _, client = restored.load_checkpoint(tmp_path, load_lr_scheduler_states=False)
    restored.lr_scheduler.load_state_dict(client["schedule"])
    train(restored, 3, 4)
    assert restored.get_lr()[0] == pytest.approx(own[1][0]) and restored.optimizer.param_groups[0]["lr"] is rate
    assert [found for found, _ in train(restored, 4, 6)] == pytest.approx([found for found, _ in own[1:]])


def test_every_schedule_has_parameters_here() -> None:
    assert set(names()) == set(PARAMS)


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
@on_ranks(2)
def test_momentum_and_rate_of_every_update_are_those_of_a_plain_loop(optimizer: str) -> None:
    torch.manual_seed(3)
    model = nn.Linear(5, 3)
    plain = getattr(torch.optim, optimizer)(model.parameters(), lr=0.05, weight_decay=0.01)
    schedule = OneCycle(plain, **PARAMS["OneCycle"])
    expected = []
    for step in range(8):
        plain.zero_grad()
        (sum(model(batch(step, rank)).square().mean() for rank in range(2)) / 2).backward()
        expected.append(in_force(plain.param_groups[0]))
        plain.step()
        schedule.step()
    for stage in (0, 3):
        engine = scheduled("OneCycle", optimizer, stage)
        assert train(engine, 0, 8) == expected
        for mine, theirs in zip(whole(engine), model.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@on_ranks(1)
def test_a_skipped_update_changes_neither_rate_nor_momentum() -> None:
    engine = scheduled("OneCycle", fp16={"enabled": True, "initial_scale_power": 4, "hysteresis": 1})
    seen = []
    for step in range(4):
        factor = float("inf") if step in (1, 2) else 1.0
        engine.backward(engine(batch(step, 0).half()).float().square().mean() * factor)
        engine.step()
        seen.append((*in_force(engine.optimizer.param_groups[0]), engine.lr_scheduler.last_batch_iteration))
    assert [step for _, _, step in seen] == [1, 1, 1, 2] and seen[0] == seen[1] == seen[2]
    assert seen[3][1][0] == pytest.approx(0.9 - 0.1 * 2 / 3)


@on_ranks(1)
def test_a_warm_up_to_auto_keeps_the_rate_of_each_group() -> None:
    model = nn.Linear(5, 3)
    groups = [{"params": [model.weight], "lr": 1e-2}, {"params": [model.bias], "lr": 1e-4}]
    warmup = {"warmup_max_lr": "auto", "warmup_num_steps": 2, "warmup_type": "linear"}
    config = config_of(0, None, scheduler={"type": "WarmupLR", "params": warmup})
    engine = shardwise.initialize(model=model, optimizer=torch.optim.AdamW(groups), config=config)[0]
    for step in range(3):
        engine.backward(engine(batch(step, 0)).square().mean())
        engine.step()
    assert engine.get_lr() == [1e-2, 1e-4]


class ByAmount(torch.optim.lr_scheduler.LRScheduler):
    """Counts what its `step` is given, as Megatron's schedule counts samples."""

    count = 0

    def step(self, increment: int) -> None:
        self.count += increment

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


@on_ranks(1)
def test_arguments_of_a_schedule_are_checked_before_the_update() -> None:
    engine = shardwise.initialize(model=nn.Linear(5, 3), config=config_of(0, SGD), lr_scheduler=ByAmount)[0]
    engine.backward(engine(batch(0, 0)).square().mean())
    before = engine.module.weight.detach().clone()
    for wrong in (None, {"epoch": 1}, {"increment": 1, "epoch": 1}):
        with pytest.raises(UsageError, match=r"ByAmount.step\(\): .*argument.*engine.step\(lr_kwargs="):
            engine.step(wrong)
    assert engine.global_steps == 0 and torch.equal(engine.module.weight, before)
    engine.step({"increment": 3})
    assert engine.global_steps == 1 and not torch.equal(engine.module.weight, before)
    assert engine.lr_scheduler.count == 3


@on_ranks(2)
def test_a_pipeline_steps_schedules_by_samples() -> None:
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 3))
    config = config_of(0, SGD, pipeline={"stages": 2}, gradient_accumulation_steps=2)
    engine = shardwise.initialize(model=model, loss_fn=nn.MSELoss(), config=config, lr_scheduler=ByAmount)[0]
    for step in range(2):
        engine.train_batch(iter([(batch(step, micro), torch.ones(2, 3)) for micro in range(2)]))
    assert engine.lr_scheduler.count == engine.global_samples == 2 * 2 * 2
