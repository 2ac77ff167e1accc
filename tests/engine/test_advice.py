"""Scripts that run without an error and do not train as their author expects are warned, once, of the cause."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_

import shardwise
from shardwise.errors import ConfigError, UsageError
from shardwise.utils.logging import warn_once
from tests.harness import on_ranks, thorough
from tests.harness.engines import end_engines
from tests.harness.logs import logged
from tests.harness.training import SGD, config_of


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))


def made(model: nn.Module, stage: int = 0, optimizer: Any = None, **config: Any) -> Any:
    return shardwise.initialize(model=model, optimizer=optimizer, config=config_of(stage, SGD, **config))[0]


def data(number: int = 0) -> torch.Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))


def train(engine: Any, steps: int = 2, inputs: Callable[[int], torch.Tensor] = data) -> None:
    for number in range(steps):
        engine.backward(engine(inputs(number)).mean())
        engine.step()


def nothing_wrong(stage: int) -> None:
    train(made(net(), stage, gradient_accumulation_steps=2), 4)


def clipped(stage: int) -> None:
    engine = made(net(), stage)
    for _ in range(2):
        engine.backward(engine(data()).mean())
        clip_grad_norm_(engine.module.parameters(), 1.0)
        engine.step()
    other = net()
    other(data()).sum().backward()
    assert clip_grad_norm_(other.parameters(), 1e-3) > 0
    assert torch.stack([p.grad.norm() for p in other.parameters()]).norm() < 1.1e-3


def batch_norm(stage: int) -> None:
    train(made(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)), stage))
    made(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6).eval(), nn.Linear(6, 1)), stage)


def same_inputs(stage: int) -> None:
    train(made(net(), stage), inputs=lambda number: torch.arange(8.0).view(2, 4) + number)


def two_optimizers(stage: int) -> None:
    model = net()
    engine = made(model, stage, torch.optim.AdamW(model.parameters()))
    assert isinstance(engine.optimizer, torch.optim.AdamW)
    train(engine)


def nothing_trained(stage: int) -> None:
    engine = made(net().requires_grad_(False), stage)
    with pytest.raises(UsageError, match="no parameter of the model was trained"):
        engine.backward(engine(data()).mean())
    made(nn.Sequential(nn.Tanh()), stage)


def other_model(stage: int) -> None:
    engine, other = made(net(), stage), net()
    for _ in range(2):
        engine.backward(other(data()).mean())
        engine.step()


def no_step(stage: int) -> None:
    engine = made(net(), stage, gradient_accumulation_steps=4)
    for number in range(9):
        engine.backward(engine(data(number)).mean())


def stepped_once_a_window(stage: int) -> None:
    engine = made(net(), stage, gradient_accumulation_steps=4)
    for number in range(8):
        engine.set_gradient_accumulation_boundary(number % 4 == 3)
        engine.backward(engine(data(number)).mean())
        if number % 4 == 3:
            engine.step()


def schedule_stepped_twice(stage: int) -> None:
    for twice in (False, True):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
        given = {"optimizer": optimizer, "lr_scheduler": schedule, "config": config_of(stage)}
        engine = shardwise.initialize(model=model, **given)[0]
        for number in range(6):
            engine.backward(engine(data(number)).mean())
            engine.step()
            if twice:
                schedule.step()


def channels_last(stage: int) -> None:
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1), nn.Flatten(), nn.Linear(16, 2))
    model = layers.to(memory_format=torch.channels_last)
    inputs = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    expected = model(inputs).detach()
    engine = made(model, stage)
    torch.testing.assert_close(engine(inputs).detach(), expected)


CASES: dict[Any, list[str]] = {
    nothing_wrong: [],
    stepped_once_a_window: [],
    clipped: ["clip_grad_norm_", "test_advice.py", "`gradient_clipping`"],
    batch_norm: ["module '1' (BatchNorm1d)", "SyncBatchNorm"],
    same_inputs: ["all 2 ranks were given the same inputs"],
    two_optimizers: ["initialize(optimizer=...) overrides the `optimizer` section", "SGD"],
    nothing_trained: ["nothing to train: Sequential has no param"],
    other_model: ["no backward pass of a step has brought a gradient", "another model"],
    schedule_stepped_twice: ["StepLR is called by the script as well", "engine.lr_scheduler"],
    channels_last: ["parameter '0.weight'", "row-major"],
    no_step: ["has been called 4 times without engine.step()", "updates after 4"],
}


@pytest.mark.parametrize("stage", [thorough(0), 3])
@on_ranks(2)
def test_what_a_script_has_not_meant_is_said_once(stage: int) -> None:
    for case, texts in CASES.items():
        warn_once.cache_clear()
        with logged(logging.WARNING) as kept:
            case(stage)
            end_engines()
        if dist.get_rank() == 0:
            assert all(any(text in line for line in kept.lines) for text in texts), (case, kept.lines)
            most = 2 if case is nothing_trained else 1  # two models
            assert len(kept.lines) == (most if texts else 0), (case, kept.lines)


@on_ranks(4)
def test_two_ranks_with_the_same_inputs_are_named() -> None:
    warn_once.cache_clear()
    with logged(logging.WARNING) as kept:
        engine = made(net(), 3)
        torch.manual_seed(1 if dist.get_rank() == 3 else dist.get_rank())
        engine.backward(engine(torch.randn(2, 4)).mean())
        engine.step()
    if dist.get_rank() == 0:
        assert [line for line in kept.lines if "ranks 1, 3 of 4 were given the same inputs" in line], kept.lines


@on_ranks(2)
def test_loaders_of_different_length_end_together() -> None:
    engine = made(net(), 3)
    loader = [data(number) for number in range(5 - 2 * dist.get_rank())]
    for batch in engine.ending_together(loader):
        engine.backward(engine(batch).mean())
        engine.step()
    assert engine.global_steps == 3


@on_ranks(1)
def test_inputs_in_fp32_of_a_model_in_16_bits_raise_an_error_that_names_the_ways() -> None:
    for section, ways in (("bf16", r"x.to\(torch.bfloat16\).*torch_autocast"), ("fp16", "auto_cast")):
        engine = made(net(), 2, **{section: {"enabled": True}})
        with pytest.raises(UsageError, match=f"(?s)inputs are float32.*{ways}"):
            engine(data())
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            engine(torch.ones(2, 5, dtype=torch.bfloat16 if section == "bf16" else torch.float16))
        engine.destroy()


class Scaled(nn.Module):
    """Multiplies by a buffer in fp32, or by a tensor that it makes in fp32."""

    def __init__(self, buffer: bool, last: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), last or nn.Linear(8, 1)
        self.register_buffer("scale", torch.ones(8) if buffer else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.ones(8) if self.scale is None else self.scale
        mean: torch.Tensor = self.last(self.first(x) * scale).mean()
        return mean


@on_ranks(1)
def test_buffers_and_tensors_in_fp32_of_a_model_in_16_bits_are_named() -> None:
    named = {True: r"buffer 'scale' is float32.*\"buffer_dtype\": \"bf16\"", False: "that the forward pass makes"}
    for buffer, last in ((True, None), (False, None), (True, nn.LayerNorm(8)), (True, nn.BatchNorm1d(8))):
        engine = made(Scaled(buffer, last), 2, bf16={"enabled": True})
        with pytest.raises(UsageError, match=f"(?s){named[buffer]}"):
            engine(torch.ones(2, 8, dtype=torch.bfloat16))
        engine.destroy()
    engine = made(Scaled(True), 2, bf16={"enabled": True}, data_types={"buffer_dtype": "bf16"})
    assert engine(torch.ones(2, 8, dtype=torch.bfloat16)).dtype is torch.bfloat16


@on_ranks(2)
def test_a_model_that_is_wrapped_in_ddp_is_refused() -> None:
    parallel = nn.parallel.DistributedDataParallel(net())
    with pytest.raises(UsageError, match=r"(?s)it is wrapped in DistributedDataParallel.*\.module"):
        made(parallel)
    with pytest.raises(UsageError, match="its module '0' is wrapped"):
        made(nn.Sequential(parallel))
    engine = made(net())
    with pytest.raises(UsageError, match=r"Pass its module \(engine.module\)"):
        made(engine)


@on_ranks(1)
def test_a_model_on_several_devices_is_refused() -> None:
    model = net()
    model.hf_device_map = {"0": 0, "2": 1}
    with pytest.raises(UsageError, match=r"several devices \(device_map: \['0', '1'\]\)"):
        made(model)
    model.hf_device_map = {"": 0}
    made(model).destroy()


# -- without an optimizer ----------------------------------------------------------------------------------------------


@on_ranks(1)
def test_the_traceback_of_a_mistake_in_the_configuration_shows_none_of_its_checks() -> None:
    with pytest.raises(ConfigError, match="did you mean `gradient_clipping`") as caught:
        made(net(), gradient_cliping=1.0)
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "build"
