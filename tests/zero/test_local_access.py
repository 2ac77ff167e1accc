"""One rank's part of weights, gradients and optimizer state at stage 3: the parts of all ranks are the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise
from shardwise import utils
from shardwise.errors import UsageError
from tests.harness import of_all_ranks, on_ranks
from tests.harness.training import Setting, start
from tests.models import CASES

CASE = CASES["odd_mlp"]


def begin(stage: int = 3, precision: str = "fp32", keep: int = 0) -> Any:
    return start(CASE, Setting(stage, precision=precision, optimizer="AdamW", lr=1e-2, keep=keep))


def backward(engine: Any, step: int) -> None:
    dtype = next(engine.module.parameters()).dtype
    engine.backward(CASE.loss(engine, CASE.data(step, dist.get_rank(), 0, dtype)))


@pytest.mark.parametrize(("world", "precision"), [(2, "fp32"), (3, "bf16")])
@on_ranks("world")
def test_parts_are_the_whole(world: int, precision: str) -> None:
    engine = begin(precision=precision)
    parameters = [p for p in engine.module.parameters() if p.numel()]
    assert all(utils.safe_get_local_optimizer_state(p, "exp_avg") is None for p in parameters)
    assert all(utils.safe_get_local_grad(p) is None for p in parameters)
    for step in range(2):
        backward(engine, step)
        seen = 0
        for parameter in parameters:
            part, whole = utils.safe_get_local_grad(parameter), utils.safe_get_full_grad(parameter)
            assert part.dim() == 1 and torch.equal(torch.cat(of_all_ranks(part)), whole.reshape(-1))
            seen += bool(whole.any())
        assert seen == len(parameters) - 1  # one is not used
        engine.step()
        held = 0
        for parameter in parameters:
            part, whole = utils.safe_get_local_fp32_param(parameter), utils.safe_get_full_fp32_param(parameter)
            assert part.dtype is torch.float32 and torch.equal(torch.cat(of_all_ranks(part)), whole.reshape(-1))
            held += part.numel()
            # A rank that steps nothing of a parameter keeps no state for it.
            states = of_all_ranks(utils.safe_get_local_optimizer_state(parameter, "exp_avg_sq"))
            whole = utils.safe_get_full_optimizer_state(parameter, "exp_avg_sq")
            assert torch.equal(torch.cat([state for state in states if state is not None]), whole.reshape(-1))
        assert held < sum(p.numel() for p in parameters)


@pytest.mark.parametrize(("precision", "keep"), [("fp32", 0), ("bf16", 10**6)])
@on_ranks(2)
def test_parts_are_set(precision: str, keep: int) -> None:
    """An engine whose parts are set trains as one whose whole tensors are set to the same."""
    engines = [begin(precision=precision, keep=keep) for _ in range(2)]
    for step in range(3):
        for engine in engines:
            backward(engine, step)
        for ours, theirs in zip(*(engine.module.parameters() for engine in engines), strict=True):
            part = utils.safe_get_local_grad(ours)
            utils.safe_set_local_grad(ours, part * 0.5 + 0.25)
            utils.safe_set_full_grad(theirs, utils.safe_get_full_grad(theirs) * 0.5 + 0.25)
            assert torch.equal(utils.safe_get_full_grad(ours), utils.safe_get_full_grad(theirs))
        for engine in engines:
            engine.step()
        for ours, theirs in zip(*(engine.module.parameters() for engine in engines), strict=True):
            utils.safe_set_local_fp32_param(ours, utils.safe_get_local_fp32_param(ours) * 1.5)
            utils.safe_set_full_fp32_param(theirs, utils.safe_get_full_fp32_param(theirs) * 1.5)
            part = utils.safe_get_local_optimizer_state(ours, "exp_avg")
            if part is not None:
                utils.safe_set_local_optimizer_state(ours, part + 0.125, "exp_avg")
            if theirs.numel():
                state = utils.safe_get_full_optimizer_state(theirs, "exp_avg")
                utils.safe_set_full_optimizer_state(theirs, state + 0.125, "exp_avg")
            with shardwise.zero.GatheredParameters([ours, theirs]):
                assert torch.equal(ours.data, theirs.data)


@on_ranks(2)
def test_refusals() -> None:
    whole = begin(stage=2)
    parameter = next(whole.module.parameters())
    for function, arguments in (
        (utils.safe_get_local_fp32_param, ()),
        (utils.safe_set_local_fp32_param, (torch.zeros(1),)),
        (utils.safe_get_local_grad, ()),
        (utils.safe_set_local_grad, (torch.zeros(1),)),
        (utils.safe_get_local_optimizer_state, ("exp_avg",)),
        (utils.safe_set_local_optimizer_state, (torch.zeros(1), "exp_avg")),
    ):
        with pytest.raises(UsageError, match=f"{function.__name__}: .*whole parameters at stages 0 to 2.*_full_"):
            function(parameter, *arguments)
        assert function(torch.nn.Parameter(torch.zeros(1)), *arguments) is None
    whole.destroy()
    engine = begin()
    parameter = next(engine.module.parameters())
    held = utils.safe_get_local_fp32_param(parameter).numel()
    for value in (torch.zeros(held + 1), torch.zeros(parameter.numel() + 7)):
        with pytest.raises(UsageError, match=f"this rank's part has {held} elements, the given value {value.numel()}"):
            utils.safe_set_local_fp32_param(parameter, value)
    utils.safe_set_local_grad(parameter, torch.zeros(held))  # there is none yet
    utils.safe_set_local_optimizer_state(parameter, torch.zeros(held), "exp_avg")
    assert utils.safe_get_local_grad(parameter) is None
