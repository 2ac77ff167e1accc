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
from tests.harness import on_ranks, run_ranks
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


def two_forwards(stage: int, bare: bool) -> tuple[str, bool]:
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
    result = masters(engine.module)
    engine.destroy()
    return result


@pytest.mark.parametrize(("stage", "bare"), [(0, False), (2, True), (3, False)])
def test_another_backward_pass(stage: int, bare: bool) -> None:
    found = run_ranks(two_forwards, 2, stage, bare)[0]
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
    released = engine.sharded.model_pass.order.phase.value == "idle"
    with shardwise.zero.GatheredParameters(list(model.parameters())):
        expected = (torch.ones(2, 4) @ model[1].weight) @ model[0].weight
        close = torch.allclose(x.grad, expected)
    engine.destroy()
    assert released
    assert close


# -- something else comes next -----------------------------------------------------------------------------------------


def gathered_parameters(engine: Any, directory: str) -> None:
    parameters_digest(engine.module)


def gathered(engine: Any, directory: str) -> None:
    with engine.gathered():
        engine(data(0)["tokens"])


def whole_gradient(engine: Any, directory: str) -> None:
    safe_get_full_grad(engine.module.blocks[0].up.weight)


def state_dict(engine: Any, directory: str) -> None:
    engine.module_state_dict()


def load_checkpoint(engine: Any, directory: str) -> None:
    engine.load_checkpoint(directory)


def save_checkpoint(engine: Any, directory: str) -> None:
    engine.save_checkpoint(directory, "other")


def destroy(engine: Any, directory: str) -> None:
    engine.destroy()


NEXT = {f.__name__: f for f in (gathered_parameters, gathered, whole_gradient, state_dict, load_checkpoint)}
NEXT |= {f.__name__: f for f in (save_checkpoint, destroy)}


def fail_apart(name: str, stage: int, directory: str) -> Any:
    """The ranks' backward passes raise in different blocks."""
    engine = start(GPT, Setting(stage=stage))
    engine.save_checkpoint(directory)
    fail_in_backward(engine, 2 - dist.get_rank(), engine.backward)
    NEXT[name](engine, directory)
    if name == "destroy":
        return None
    engine.zero_grad()
    engine.backward(GPT.loss(engine, data(0)))
    engine.step()
    result = masters(engine.module)
    engine.destroy()
    return result


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("gathered_parameters", 2),
        ("gathered", 3),
        ("whole_gradient", 2),
        ("state_dict", 3),
        ("load_checkpoint", 2),
        ("save_checkpoint", 3),
        ("destroy", 2),
    ],
)
def test_collectives_outside_of_passes(name: str, stage: int, tmp_path: Any) -> None:
    found = run_ranks(fail_apart, 2, name, stage, str(tmp_path), timeout=60)[0]
    if found is not None:
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
    result = masters(engine.module), engine.sharded.unsharder.late
    engine.destroy()
    found, rescues = result
    assert rescues == 0
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
    engine.destroy()
    assert gathers == 2 * units  # the only unit waits for the backward pass
