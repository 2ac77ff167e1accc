"""Schedules by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwise.errors import ConfigError
from shardwise.schedules import VALID_LR_SCHEDULES, WarmupDecayLR, build, names


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1)], lr=0.5)


def test_our_names() -> None:
    assert VALID_LR_SCHEDULES == ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]
    assert set(VALID_LR_SCHEDULES) < set(names())
    params = {"total_num_steps": 10, "warmup_num_steps": 5}
    schedule = build("WarmupDecayLR", sgd(), params)
    assert type(schedule) is WarmupDecayLR
    assert params == {"total_num_steps": 10, "warmup_num_steps": 5}


@pytest.mark.parametrize(
    ("name", "params", "rates"),
    [
        ("StepLR", {"step_size": 2, "gamma": 0.5}, [0.5, 0.5, 0.25, 0.25]),
        ("LinearLR", {"start_factor": 0.5, "total_iters": 2}, [0.25, 0.375, 0.5, 0.5]),
        ("ExponentialLR", {"gamma": 0.5}, [0.5, 0.25, 0.125, 0.0625]),
    ],
)
def test_torch_schedules_follow_the_same_convention(name: str, params: dict[str, Any], rates: list[float]) -> None:
    optimizer = sgd()
    schedule = build(name, optimizer, params)
    used = []
    for _ in range(4):
        used.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert used == rates


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("warmuplr", {}, 'no schedule "warmuplr" .*; did you mean "WarmupLR"'),
        ("Nothing", {}, 'no schedule "Nothing" .*; known: ConstantLR, .* LRRangeTest, '),
        ("WarmupLR", {"warmup_steps": 3}, "warmup_steps: .* did you mean .*warmup_num_steps"),
        ("WarmupDecayLR", {"total_num_steps": 2.5}, "total_num_steps"),
        ("OneCycle", {"cycle_min_lr": 0.1}, "cycle_max_lr"),
        ("WarmupLR", {"warmup_max_lr": "auto"}, 'warmup_max_lr: "auto" has to be replaced'),
        ("StepLR", {}, "step_size"),
        ("OneCycleLR", {"max_lr": 1.0}, "OneCycleLR refuses .max_lr=1.0.: You must define"),
        ("ReduceLROnPlateau", {}, "needs a metric"),
        ("LambdaLR", {}, "takes functions"),
        ("SequentialLR", {}, "takes schedule objects"),
        ("LRScheduler", {}, "base class"),
    ],
)
def test_wrong_names_and_options(name: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(name, sgd(), params)
