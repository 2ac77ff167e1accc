"""`initialize`: every way of calling it that users have, and what it says when it is called wrongly."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import StepLR

import shardwise
from shardwise.config import resolve
from shardwise.errors import ConfigError, DesyncError, NotBuiltError, UsageError
from shardwise.memory import Category
from tests.harness import of_all_ranks, on_ranks
from tests.harness.logs import logged

CONFIG = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
SHARDED: dict[str, Any] = {**CONFIG, "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))


def train(engine: Any, steps: int = 2) -> None:
    for step in range(steps):
        x = torch.randn(2, 5, generator=torch.Generator().manual_seed(step))
        engine.backward(engine(x).square().mean())
        engine.step()


WAYS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "config": lambda model: {},
    "generator": lambda model: {"model_parameters": (p for p in model.parameters())},
    "named": lambda model: {"model_parameters": model.named_parameters()},
    "text": lambda model: {"config": json.dumps(SHARDED)},
}
"""Arguments; `tests.zero.test_optimizers` has ways of giving an optimizer."""


@pytest.mark.parametrize("way", WAYS)
@on_ranks(1)
def test_a_single_process_needs_no_launcher(way: str) -> None:
    dist.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    model = net()
    before = [p.detach().clone() for p in model.parameters()]
    given = {"config": SHARDED, **WAYS[way](model)}
    engine, optimizer, loader, scheduler = shardwise.initialize(model=model, **given)
    train(engine)
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    counts = engine.global_steps, engine.micro_steps, engine.global_samples, engine.skipped_steps
    assert counts == (2, 2, 4, 0) and loader is scheduler is None and type(optimizer).__name__ == "AdamW"
    names = ["0.weight", "0.bias", "2.weight", "2.bias"] if way == "named" else None
    assert optimizer.param_groups[0].get("param_names") == names


@on_ranks(2)
def test_an_initialised_process_group_is_adopted_and_left_alone() -> None:
    group, model = dist.group.WORLD, net()
    engine, *_ = shardwise.initialize(model=model, config=dict(CONFIG, zero_optimization={"stage": 2}))
    train(engine)
    first, second = of_all_ranks(sum(float(p.detach().sum()) for p in model.parameters()))
    assert first == second and dist.group.WORLD is group
    check = torch.ones(1)  # the group is as usable as before
    dist.all_reduce(check)
    assert check.item() == 2


@on_ranks(2)
def test_ranks_with_another_torch_are_refused() -> None:
    found = f"2.1{dist.get_rank()}"
    with (
        mock.patch.object(torch, "__version__", found),
        pytest.raises(DesyncError, match=r"torch: 2\.10 on rank 0, 2\.11 on rank 1"),
    ):
        shardwise.initialize(model=net(), config=CONFIG)


@on_ranks(4)
def test_an_mpu_names_the_ranks_that_share_the_data() -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half, model = dist.get_rank() // 2, net()
    unit = SimpleNamespace(get_data_parallel_group=lambda: groups[half])
    engine, *_ = shardwise.initialize(model=model, config=SHARDED, mpu=unit)
    assert engine.dp_world_size == 2
    for step in range(2):
        x = torch.randn(2, 5, generator=torch.Generator().manual_seed(step + 10 * half))
        engine.backward(engine(x).square().mean())
        engine.step()
    with shardwise.zero.GatheredParameters(list(model.parameters())):
        totals = of_all_ranks(sum(float(p.detach().sum()) for p in model.parameters()))
    assert totals[0] == totals[1] != totals[2] == totals[3]


def test_an_mpu_with_pipeline_stages_or_without_groups_is_refused() -> None:
    method = "get_pipeline_model_parallel_world_size"
    unit = SimpleNamespace(get_data_parallel_group=lambda: None, **{method: lambda: 2})
    with pytest.raises(NotBuiltError, match=rf"mpu\.{method}\(\) is 2"):
        shardwise.initialize(model=net(), config=CONFIG, mpu=unit)
    setattr(unit, method, lambda: 1)
    engine, *_ = shardwise.initialize(model=net(), config=CONFIG, mpu=unit)
    engine.destroy()
    unit.get_model_parallel_world_size = lambda: 2
    with pytest.raises(UsageError, match=r"needs get_tensor_model_parallel_group\(\)"):
        shardwise.initialize(model=net(), config=CONFIG, mpu=unit)


@on_ranks(1)
def test_a_model_that_is_all_frozen_is_told_from_one_without_an_optimizer() -> None:
    engine, *_ = shardwise.initialize(model=net().requires_grad_(False), config=CONFIG)
    with pytest.raises(UsageError, match="required a gradient") as caught:
        engine.step()
    assert "section" not in str(caught.value)


@on_ranks(2)
def test_a_model_can_be_sharded_without_an_optimizer() -> None:
    config = {**SHARDED, "optimizer": None}
    engine, optimizer, _, _ = shardwise.initialize(model=net(), model_parameters=[], config=config)
    assert optimizer is None
    with torch.no_grad():
        assert engine(torch.ones(1, 5)).shape == (1, 1)
    with pytest.raises(UsageError, match="no optimizer"):
        engine.step()


def test_wrong_arguments_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"expects an nn\.Module, got NoneType"):
        shardwise.initialize(None, config=CONFIG)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="config"):
        shardwise.initialize(model=net())  # type: ignore[call-arg]
    for name in ("args", "config_params", "mesh_param", "dist_init_required", "distributed_port"):
        with pytest.raises(UsageError, match=rf"initialize\({name}=...\).*deepspeed\.initialize"):
            shardwise.initialize(model=net(), config=CONFIG, **{name: None})
    with pytest.raises(UsageError, match="expects an Optimizer or a callable, got str"):
        shardwise.initialize(model=net(), config=CONFIG, optimizer="AdamW")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"returned int, not a torch\.optim\.Optimizer"):
        shardwise.initialize(model=net(), config=CONFIG, optimizer=lambda params: 3)  # type: ignore[arg-type,return-value]
    with pytest.raises(UsageError, match=r"2 parameters or buffers of the model have no shape yet \(0\.weight\)"):
        shardwise.initialize(model=nn.Sequential(nn.LazyLinear(3)), config=CONFIG)
    with pytest.raises(UsageError, match="mesh"):
        shardwise.initialize(model=net(), config=CONFIG, mesh=(1,))


@on_ranks(1)
def test_wrong_schedulers_are_named_before_anything_is_sharded() -> None:
    model, other = net(), torch.optim.SGD(net().parameters(), lr=0.1)
    foreign = r"another optimizer \(SGD\) than the engine's AdamW"
    for wrong, words in (
        (3, "int is neither"),
        (lambda optimizer: None, "which returned NoneType, is neither"),
        (StepLR(other, 1), foreign),
        (lambda optimizer: StepLR(other, 1), foreign),
    ):
        with pytest.raises(UsageError, match=words):
            shardwise.initialize(model=model, config=CONFIG, lr_scheduler=wrong)
    with pytest.raises(UsageError, match="no optimizer"):
        shardwise.initialize(model=model, config=CONFIG, model_parameters=[], lr_scheduler=partial(StepLR, step_size=1))
    assert all(type(p) is nn.Parameter for p in model.parameters())


class Halving(StepLR):
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer, step_size=1, gamma=0.5)


@on_ranks(1)
def test_a_scheduler_is_a_class_a_callable_or_an_instance() -> None:
    for kind in (Halving, partial(StepLR, step_size=1, gamma=0.5), None):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
        schedule = kind or Halving(optimizer)
        found = shardwise.initialize(model=model, config=CONFIG, optimizer=optimizer, lr_scheduler=schedule)
        assert isinstance(found.lr_scheduler, StepLR)
        train(found.engine)
        assert found.engine.get_lr() == [0.1]
        found.engine.destroy()


class SharedTable(nn.Module):
    """Two modules with one buffer, and one that is to stay wide."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.wide = nn.Linear(3, 3), nn.Linear(3, 1), nn.Module()
        self.first.register_buffer("table", torch.ones(16))
        self.second.register_buffer("table", self.first.table)
        self.wide.register_buffer("table", torch.ones(16))


@on_ranks(1)
def test_shared_buffers_stay_shared_and_are_counted_once() -> None:
    types = {"buffer_dtype": "bf16", "keep_in_fp32_modules": ["wide"]}
    config = {"train_micro_batch_size_per_gpu": 2, "data_types": types}
    engine, *_ = shardwise.initialize(model=SharedTable(), config=config)
    model = engine.module
    assert model.first.table is model.second.table and model.first.table.dtype is torch.bfloat16
    assert model.wide.table.dtype is torch.float32
    assert engine.accountant.live[Category.OTHER] == 16 * 2 + 16 * 4


def units_of(leaf: dict[str, Any]) -> tuple[list[str], int]:
    """Return what is logged of leaf modules, and the number of units."""
    zero = {"stage": 3, "reduce_bucket_size": 1, "leaf_module": leaf}
    model = nn.Sequential(net(), net())
    with logged() as kept:
        engine, *_ = shardwise.initialize(model=model, config=dict(CONFIG, zero_optimization=zero))
        units = len(engine.sharded.units)
        engine.destroy()
    return [text for text in kept.lines if "leaf_module" in text], units


@on_ranks(2)
def test_leaf_modules_that_match_nothing_are_named() -> None:
    none, apart = units_of({})
    quiet, units = units_of({"names": "0", "name_suffixes": ["1"]})
    warned, more = units_of({"classes": ["Sequentail", "torch.nn.modules.container.Sequential"]})
    assert not none and not quiet and max(units, more) < apart
    if dist.get_rank() == 0:
        assert len(warned) == 1 and "Sequentail" in warned[0]


@on_ranks(2)
def test_the_log_level_is_set_and_the_configuration_is_logged_on_rank_0() -> None:
    logger = logging.getLogger("shardwise")
    level = logger.level
    with logged() as kept:
        engine, *_ = shardwise.initialize(model=net(), config={**CONFIG, "dump_state": True, "log_level": "DEBUG"})
        assert logger.level == logging.DEBUG
        engine.destroy()
    logger.setLevel(level)
    shown = [message for message in kept.lines if message.startswith("configuration: ")]
    assert len(shown) == (dist.get_rank() == 0)
    for text in shown:
        effective = json.loads(text.removeprefix("configuration: "))
        assert effective["train_batch_size"] == 4 and effective["optimizer"]["type"] == "adamw"
    with pytest.raises(ConfigError, match="log_level"):
        resolve({"train_batch_size": 1, "log_level": "loud"})
