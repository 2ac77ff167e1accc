"""What an engine holds: parts that do not know it, and can be used without it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import shardwise
from shardwise.engine.getters import GETTERS, ConfigGetters
from shardwise.engine.state_getters import StateGetters
from tests.harness import run_ranks


def build() -> Any:
    torch.manual_seed(1)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "scheduler": {"type": "WarmupLR"},
        "zero_optimization": {"stage": 2},
    }
    return shardwise.initialize(model=nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1)), config=config)[0]


def parts() -> None:
    engine = build()
    held = [value for value in vars(engine).values() if type(value).__module__.startswith("shardwise.engine")]
    assert {type(part).__name__ for part in held} == {
        *("TrainStep", "Batches", "Checkpoints", "Interchange", "FaultTolerance", "MemoryReporting", "Activations"),
        *("Observers", "Profiling", "Timelines", "Following", "OwnSequences"),
    }
    assert not any(isinstance(value, shardwise.Engine) for part in held for value in vars(part).values())
    engine.destroy()


def test_an_engine_is_made_of_parts_that_do_not_know_it() -> None:
    assert shardwise.Engine.__bases__ == (ConfigGetters, StateGetters)
    run_ranks(parts, 1)


def test_getters_are_no_members_that_are_written_out() -> None:
    assert all(getattr(shardwise.Engine, name).__module__ == "shardwise.engine.getters" for name in GETTERS)
    assert not set(GETTERS) & set(dir(nn.Module))


def steps_without_engine() -> None:
    engine, other = build(), build()
    torch.manual_seed(2)
    for number in range(4):
        batch = torch.randn(2, 4)
        engine.backward(engine(batch).square().mean())
        engine.step()
        step, sharded = other._step, other.sharded
        with step.passing(other.module(batch).square().mean()) as roots:
            sharded.backward(roots)
        assert step.take() == (number % 2 == 1)
    assert (step.global_steps, step.micro_steps, step.global_samples) == (2, 4, engine.global_samples)
    assert torch.equal(step.last_step.grad_norm, engine.last_step.grad_norm)
    assert step.last_step.lr == engine.last_step.lr and step.lr_scheduler is other.lr_scheduler
    for one, two in zip(engine.module.parameters(), other.module.parameters(), strict=True):
        assert torch.equal(one, two)
    engine.destroy()
    other.destroy()


def test_a_step_is_taken_without_an_engine() -> None:
    run_ranks(steps_without_engine, 2)
