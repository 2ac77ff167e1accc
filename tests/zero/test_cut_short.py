"""Passes that an exception has cut short: whatever comes next ends them, on every rank alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise
from shardwise.errors import ReleasedParameterError
from shardwise.utils import safe_get_full_grad
from tests.harness import on_ranks, thorough
from tests.harness.training import SGD, Setting, assert_close, engine_of, masters, parameters_digest, plain, start
from tests.models import CASES, Batch

GPT = CASES["gpt"]


class Boom(Exception):
    pass


def data(step: int) -> Batch:
    return GPT.data(step, 0, dist.get_rank(), torch.float32)


def explode(*_: Any) -> None:
    raise Boom


def fail_in_backward(engine: Any, block: int, backward: Callable[[torch.Tensor], Any]) -> None:
    """A backward pass raises where it reaches a block."""
    handle = engine.module.blocks[block].up.weight.register_hook(explode)
    loss = GPT.loss(engine, data(7))
    with pytest.raises(Boom):
        backward(loss)
    handle.remove()


# -- a second backward pass comes next ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "bare"), [thorough(0, False), (2, True), (3, False)])
@on_ranks(2)
def test_another_backward_pass(stage: int, bare: bool) -> None:
    """The first of two losses fails, the second is differentiated; then the window is dropped and repeated."""
    engine = start(GPT, Setting(stage=stage))
    backward = torch.Tensor.backward if bare else engine.backward
    for step in range(2):
        handle = engine.module.blocks[1].up.weight.register_hook(explode)
        first = GPT.loss(engine, data(7))
        second = GPT.loss(engine, data(8))
        with pytest.raises(Boom):
            backward(first)
        handle.remove()
        backward(second)
        engine.zero_grad()
        backward(GPT.loss(engine, data(step)))
        engine.step()
    found = masters(engine.module)
    assert_close(found, plain(GPT, Setting(), 2, 2).masters, 1e-6)


@on_ranks(2)
def test_another_backward_pass_where_nothing_is_trained() -> None:
    """Nothing is trained; gradients of the inputs are wanted."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).requires_grad_(False)
    engine = engine_of(model)
    x = torch.ones(2, 4, requires_grad=True)
    first, second = engine(x), engine(x)
    handle = first.grad_fn.register_hook(explode)
    with pytest.raises(Boom):
        first.sum().backward()
    handle.remove()
    second.sum().backward()
    assert engine.sharded.model_pass.order.phase.value == "idle"
    with shardwise.zero.GatheredParameters(list(model.parameters())):
        assert torch.allclose(x.grad, (torch.ones(2, 4) @ model[1].weight) @ model[0].weight)


# -- something else comes next -----------------------------------------------------------------------------------------


def gathered(engine: Any, directory: str) -> None:
    with engine.gathered():
        engine(data(0)["tokens"])


NEXT: dict[str, Callable[[Any, str], Any]] = {
    "gathered parameters": lambda engine, directory: parameters_digest(engine.module),
    "gathered": gathered,
    "whole gradient": lambda engine, directory: safe_get_full_grad(engine.module.blocks[0].up.weight),
    "state_dict": lambda engine, directory: engine.module_state_dict(),
    "load_checkpoint": lambda engine, directory: engine.load_checkpoint(directory),
    "save_checkpoint": lambda engine, directory: engine.save_checkpoint(directory, "other"),
    "destroy": lambda engine, directory: engine.destroy(),
}


@pytest.mark.parametrize(("name", "stage"), list(zip(NEXT, (2, 3, 2, 3, 2, 3, 2), strict=True)))
@on_ranks(2, timeout=60)
def test_collectives_outside_of_passes(name: str, stage: int, tmp_path: Any) -> None:
    """The ranks' backward passes raise in different blocks."""
    engine = start(GPT, Setting(stage=stage))
    engine.save_checkpoint(tmp_path)
    fail_in_backward(engine, 2 - dist.get_rank(), engine.backward)
    NEXT[name](engine, str(tmp_path))
    if name == "destroy":
        return
    engine.zero_grad()
    engine.backward(GPT.loss(engine, data(0)))
    engine.step()
    found = masters(engine.module)
    assert_close(found, plain(GPT, Setting(), 2, 1).masters, 1e-6)


# -- interrupts in a forward pass --------------------------------------------------------------------------------------


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(("stage", "ranks"), [(1, [0, 1]), (3, [1])])
@on_ranks(2)
def test_an_interrupt_in_a_forward_pass(stage: int, ranks: list[int]) -> None:
    """Ctrl-C in the middle of a forward pass (hooks are not called then); the script goes on."""
    engine = start(GPT, Setting(stage=stage))
    for step in range(2):
        if dist.get_rank() in ranks:
            handle = engine.module.blocks[1].up.register_forward_hook(interrupt)
            with pytest.raises(KeyboardInterrupt):
                GPT.loss(engine, data(7))
            handle.remove()
        else:
            GPT.loss(engine, data(7))
        if step:
            engine.zero_grad()
            assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
            if stage == 3:
                with pytest.raises(ReleasedParameterError):
                    engine.module.blocks[0].up.weight.sum()
        engine.backward(GPT.loss(engine, data(step)))
        engine.step()
    assert engine.sharded.unsharder.late == 0
    found = masters(engine.module)
    assert_close(found, plain(GPT, Setting(), 2, 2).masters, 1e-6)


class Recursive(torch.nn.Module):
    """Calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, depth: int) -> torch.Tensor:
        return self(x * self.scale, depth - 1) * self.scale if depth else x


@on_ranks(2)
def test_a_module_that_calls_itself_is_one_pass() -> None:
    engine = engine_of(Recursive(), 3, SGD)
    for _ in range(2):
        engine.backward(engine(torch.ones(3), 3).sum())
        engine.step()
    gathers, units = engine.ledger.totals["all_gather"].count, len(engine.sharded.units)
    assert gathers == 2 * units  # the only unit waits for the backward pass
