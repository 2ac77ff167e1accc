"""`initialize`: every way of calling it that users have, and what it says when it is called wrongly."""

from __future__ import annotations

import json
import logging
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
from shardwise.engine.facts import facts_of
from shardwise.errors import ConfigError, DesyncError, NotBuiltError, UsageError
from tests.harness import run_ranks
from tests.harness.logs import Lines

CONFIG = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))


def train(engine: Any, steps: int = 2) -> None:
    for step in range(steps):
        x = torch.randn(2, 5, generator=torch.Generator().manual_seed(step))
        engine.backward(engine(x).square().mean())
        engine.step()


def single_process(what: str) -> dict[str, Any]:
    """Without any launcher, with nothing initialised."""
    if dist.is_initialized():
        dist.destroy_process_group()
    import os

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    model = net()
    before = [p.detach().clone() for p in model.parameters()]
    config: dict[str, Any] = dict(CONFIG, zero_optimization={"stage": 3, "stage3_param_persistence_threshold": 0})
    kwargs: dict[str, Any] = {"config": config}
    if what == "instance":
        kwargs["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
    elif what == "class":
        kwargs["optimizer"] = torch.optim.SGD
    elif what == "callable":
        kwargs["optimizer"] = lambda params: torch.optim.SGD(params, lr=0.3)
        kwargs["lr_scheduler"] = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    elif what == "generator":
        kwargs["model_parameters"] = (p for p in model.parameters())
    elif what == "groups":
        kwargs["model_parameters"] = [
            {"params": list(model[0].parameters()), "lr": 0.5},
            {"params": model[2].parameters()},
        ]
    elif what == "named":
        kwargs["model_parameters"] = model.named_parameters()
    elif what == "text":
        kwargs = {"config": json.dumps(config)}
    engine, optimizer, loader, scheduler = shardwise.initialize(model=model, **kwargs)
    train(engine)
    changed = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    result = {
        "changed": all(changed),
        "optimizer": type(optimizer).__name__,
        "lrs": engine.get_lr(),
        "names": optimizer.param_groups[0].get("param_names"),
        "kept": optimizer is kwargs.get("optimizer"),
        "loader": loader,
        "scheduler": type(scheduler).__name__,
        "steps": (engine.global_steps, engine.micro_steps, engine.global_samples, engine.skipped_steps),
        "initialised": dist.is_initialized(),
    }
    engine.destroy()
    return result


@pytest.mark.parametrize("what", ["config", "instance", "class", "callable", "generator", "named", "groups", "text"])
def test_a_single_process_needs_no_launcher(what: str) -> None:
    result = run_ranks(single_process, 1, what)[0]
    assert result["changed"]
    assert result["steps"] == (2, 2, 4, 0)
    assert result["loader"] is None
    expected = {"instance": "SGD", "class": "SGD", "callable": "SGD"}.get(what, "AdamW")
    assert result["optimizer"] == expected
    assert result["kept"] == (what == "instance")
    assert result["names"] == (["0.weight", "0.bias", "2.weight", "2.bias"] if what == "named" else None)
    if what == "groups":
        assert result["lrs"] == [0.5, 1e-2]
    if what == "callable":
        assert result["scheduler"] == "StepLR"
        assert result["lrs"] == [0.3 * 0.25]


def inside_a_process_group() -> tuple[float, int, bool]:
    group = dist.group.WORLD
    model = net()
    engine, *_ = shardwise.initialize(model=model, config=dict(CONFIG, zero_optimization={"stage": 2}))
    train(engine)
    total = sum(float(p.detach().sum()) for p in model.parameters())
    same = dist.group.WORLD is group
    engine.destroy()
    # The user's group is as usable as before.
    check = torch.ones(1)
    dist.all_reduce(check)
    return total, int(check.item()), same


def test_an_initialised_process_group_is_adopted_and_left_alone() -> None:
    (a, ranks, same), (b, _, _) = run_ranks(inside_a_process_group, 2)
    assert a == b
    assert ranks == 2
    assert same


def with_another_torch() -> str:
    found = f"2.1{dist.get_rank()}"
    with mock.patch.object(torch, "__version__", found), pytest.raises(DesyncError) as caught:
        shardwise.initialize(model=net(), config=CONFIG)
    return str(caught.value)


def test_ranks_with_another_torch_are_refused() -> None:
    for text in run_ranks(with_another_torch, 2):
        assert "torch: 2.10 on rank 0, 2.11 on rank 1" in text


def on_half_of_the_ranks() -> tuple[int, float]:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    rank = dist.get_rank()

    class Unit:
        def get_data_parallel_group(self) -> Any:
            return groups[rank // 2]

    model = net()
    engine, *_ = shardwise.initialize(
        model=model,
        config=dict(CONFIG, zero_optimization={"stage": 3, "stage3_param_persistence_threshold": 0}),
        mpu=Unit(),
    )
    for step in range(2):
        x = torch.randn(2, 5, generator=torch.Generator().manual_seed(step + 10 * (rank // 2)))
        engine.backward(engine(x).square().mean())
        engine.step()
    with shardwise.zero.GatheredParameters(list(model.parameters())):
        total = sum(float(p.detach().sum()) for p in model.parameters())
    world = engine.dp_world_size
    engine.destroy()
    return world, total


def test_an_mpu_names_the_ranks_that_share_the_data() -> None:
    results = run_ranks(on_half_of_the_ranks, 4)
    assert [world for world, _ in results] == [2, 2, 2, 2]
    assert results[0] == results[1]
    assert results[2] == results[3]
    assert results[0] != results[2]


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


def test_machines_may_keep_copies_in_directories_of_their_own() -> None:
    def facts(directory: str, every: int = 10) -> dict[str, str]:
        copies = {"every": every, "directory": directory}
        return facts_of(net(), None, resolve({**CONFIG, "checkpoint": {"memory_copies": copies}}))

    assert facts("/dev/shm") == facts("/run/user/1000") != facts("/dev/shm", 11)


def wrapped_twice() -> tuple[bool, float, float]:
    model = net()
    first, *_ = shardwise.initialize(
        model=model, config=dict(CONFIG, zero_optimization={"stage": 3, "stage3_param_persistence_threshold": 0})
    )
    train(first, 1)
    with shardwise.zero.GatheredParameters(list(model.parameters())):
        before = sum(float(p.detach().sum()) for p in model.parameters())
    second, *_ = shardwise.initialize(model=model, config=dict(CONFIG, zero_optimization={"stage": 1}))
    after = sum(float(p.detach().sum()) for p in model.parameters())
    train(second, 1)
    second.destroy()
    return all(type(p) is nn.Parameter for p in model.parameters()), before, after


def test_wrapping_a_model_again_keeps_its_values() -> None:
    for plain, before, after in run_ranks(wrapped_twice, 2):
        assert plain
        assert before == after


def nothing_to_train() -> str:
    engine, *_ = shardwise.initialize(model=net().requires_grad_(False), config=CONFIG)
    with pytest.raises(UsageError) as caught:
        engine.step()
    engine.destroy()
    return str(caught.value)


def test_a_model_that_is_all_frozen_is_told_from_one_without_an_optimizer() -> None:
    message = run_ranks(nothing_to_train, 1)[0]
    assert "required a gradient" in message
    assert "section" not in message


def evaluated_only() -> tuple[Any, torch.Size, str]:
    model = net()
    engine, optimizer, _, _ = shardwise.initialize(
        model=model,
        model_parameters=[],
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        },
    )
    with torch.no_grad():
        shape = engine(torch.ones(1, 5)).shape
    try:
        engine.step()
        message = ""
    except UsageError as error:
        message = str(error)
    engine.destroy()
    return optimizer, shape, message


def test_a_model_can_be_sharded_without_an_optimizer() -> None:
    for optimizer, shape, message in run_ranks(evaluated_only, 2):
        assert optimizer is None
        assert shape == (1, 1)
        assert "no optimizer" in message


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


def wrong_schedulers() -> list[str]:
    model = net()
    other = torch.optim.SGD(net().parameters(), lr=0.1)
    messages = []
    for wrong in (3, lambda optimizer: None, StepLR(other, 1), lambda optimizer: StepLR(other, 1)):
        with pytest.raises(UsageError) as caught:
            shardwise.initialize(model=model, config=CONFIG, lr_scheduler=wrong)
        messages.append(str(caught.value))
    with pytest.raises(UsageError) as none:
        shardwise.initialize(model=model, config=CONFIG, model_parameters=[], lr_scheduler=partial(StepLR, step_size=1))
    assert all(type(p) is nn.Parameter for p in model.parameters())
    return [*messages, str(none.value)]


def test_wrong_schedulers_are_named_before_anything_is_sharded() -> None:
    number, nothing, foreign, made_foreign, none = run_ranks(wrong_schedulers, 1)[0]
    assert "int is neither" in number
    assert "function, which returned NoneType, is neither" in nothing
    for message in (foreign, made_foreign):
        assert "StepLR sets the learning rates of another optimizer (SGD) than the engine's AdamW" in message
    assert "no optimizer" in none


def scheduler_kinds() -> list[list[float]]:
    class Halving(StepLR):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            super().__init__(optimizer, step_size=1, gamma=0.5)

    rates = []
    for kind in (Halving, partial(StepLR, step_size=1, gamma=0.5), None):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
        given = kind or Halving(optimizer)
        engine, _, _, scheduler = shardwise.initialize(
            model=model, config=CONFIG, optimizer=optimizer, lr_scheduler=given
        )
        assert isinstance(scheduler, StepLR)
        train(engine)
        rates.append(engine.get_lr())
        engine.destroy()
    return rates


def test_a_scheduler_is_a_class_a_callable_or_an_instance() -> None:
    assert run_ranks(scheduler_kinds, 1)[0] == [[0.1], [0.1], [0.1]]


class SharedTable(nn.Module):
    """Two modules with one buffer, and one that is to stay wide."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.wide = nn.Linear(3, 3), nn.Linear(3, 1), nn.Module()
        self.first.register_buffer("table", torch.ones(16))
        self.second.register_buffer("table", self.first.table)
        self.wide.register_buffer("table", torch.ones(16))


def shared_buffers() -> list[Any]:
    from shardwise.memory import Category

    engine, *_ = shardwise.initialize(
        model=SharedTable(),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "data_types": {"buffer_dtype": "bf16", "keep_in_fp32_modules": ["wide"]},
        },
    )
    model = engine.module
    counted = engine.accountant.live[Category.OTHER]
    engine.destroy()
    return [model.first.table is model.second.table, model.first.table.dtype, model.wide.table.dtype, counted]


def fp32_by_name() -> list[torch.dtype]:
    model = SharedTable()
    model._keep_in_fp32_modules = ["second"]  # as transformers' models do
    model.second.table = torch.ones(3)
    config = {"train_micro_batch_size_per_gpu": 2, "data_types": {"buffer_dtype": "fp16", "param_dtype": "fp32"}}
    engine, *_ = shardwise.initialize(model=model, config=config)
    engine.destroy()
    return [model.first.table.dtype, model.second.table.dtype, model.wide.table.dtype]


def test_a_model_names_the_modules_whose_buffers_stay_fp32() -> None:
    assert run_ranks(fp32_by_name, 1) == [[torch.float16, torch.float32, torch.float16]]


def test_shared_buffers_stay_shared_and_are_counted_once() -> None:
    for found in run_ranks(shared_buffers, 1):
        assert found == [True, torch.bfloat16, torch.float32, 16 * 2 + 16 * 4]


def kept_together(leaf: dict[str, Any]) -> tuple[list[str], int]:
    logging.getLogger("shardwise").addHandler(handler := Lines())
    zero = {"stage": 3, "reduce_bucket_size": 1, "leaf_module": leaf}
    engine, *_ = shardwise.initialize(model=nn.Sequential(net(), net()), config=dict(CONFIG, zero_optimization=zero))
    units = len(engine.sharded.units)
    engine.destroy()
    logging.getLogger("shardwise").removeHandler(handler)
    return [text for text in handler.lines if "leaf_module" in text], units


def test_leaf_modules_that_match_nothing_are_named() -> None:
    quiet, units = run_ranks(kept_together, 2, {"names": "0", "name_suffixes": ["1"]})[0]
    assert not quiet
    warned, more = run_ranks(kept_together, 2, {"classes": ["Sequentail", "torch.nn.modules.container.Sequential"]})[0]
    assert len(warned) == 1
    assert warned[0].endswith("no module of Sequential matches Sequentail")
    silent, apart = run_ranks(kept_together, 2, {})[0]
    assert not silent
    assert max(units, more) < apart


def logging_keys() -> tuple[list[str], int]:
    """What is logged with dump_state, and the level that log_level sets."""
    logger, kept = logging.getLogger("shardwise"), Lines()
    level = logger.level
    logger.addHandler(kept)
    try:
        engine, *_ = shardwise.initialize(model=net(), config={**CONFIG, "dump_state": True, "log_level": "DEBUG"})
        set_to = logger.level
        engine.destroy()
    finally:
        logger.removeHandler(kept)
        logger.setLevel(level)
    return [message for message in kept.lines if message.startswith("configuration: ")], set_to


def test_the_log_level_is_set_and_the_configuration_is_logged_on_rank_0() -> None:
    (first, level), (second, other) = run_ranks(logging_keys, 2)
    assert level == other == logging.DEBUG and not second
    effective = json.loads(first[0].removeprefix("configuration: "))
    assert effective["train_batch_size"] == 4 and effective["optimizer"]["type"] == "adamw"
    with pytest.raises(ConfigError, match=r'log_level: expected one of .*"debug"'):
        shardwise.config.resolve({"train_batch_size": 1, "log_level": "loud"})
