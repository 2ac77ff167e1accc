"""What scripts written against the API call, and what they get where a rank has nothing, or a call means nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardwise.errors import CheckpointError
from shardwise.zero.access import safe_get_local_fp32_param, safe_get_local_optimizer_state
from tests.harness import on_ranks, run_ranks, thorough
from tests.harness.training import engine_of


def build(stage: int, model: nn.Module, **config: Any) -> Any:
    adam = {"type": "Adam", "params": {"lr": 1e-3}}
    return engine_of(model, stage, adam, train_micro_batch_size_per_gpu=1, **config)


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def transformed(stage: int, config: dict[str, Any]) -> list[bool]:
    """Transforms of torch.func over the engine, in front of steps and after one, as over a plain model."""
    engine, x = build(stage, net(), **config), torch.randn(8)
    seen = []
    for _ in range(2):
        plain = net()
        plain.load_state_dict(engine.module_state_dict())
        for transform in (
            lambda model: torch.func.grad(lambda v: model(v).sum())(x),
            lambda model: torch.func.vjp(model, x)[1](torch.ones(4))[0],
            lambda model: torch.func.jacrev(model)(x),
            lambda model: torch.func.vmap(model)(torch.stack([x, 2 * x])),
        ):
            close = torch.allclose(transform(engine), transform(plain), rtol=1e-5)
            seen.append(close)
        counters = engine.micro_steps
        engine.step()  # a transform is no micro-batch
        seen.append(engine.micro_steps == counters)
        engine.backward(engine(torch.ones(2, 8)).sum())
        engine.step()
        seen.append(engine.was_step_applied())
    engine.destroy()
    return seen


@pytest.mark.parametrize("stage", [0, thorough(1), 2])
def test_transforms_of_torch_func_over_the_engine(stage: int) -> None:
    assert all(all(seen) for seen in run_ranks(transformed, 2, stage, {}))


def narrow() -> list[Any]:
    engine = build(3, nn.Sequential(nn.Linear(64, 1), nn.Linear(1, 64)))
    first = [safe_get_local_optimizer_state(p, "exp_avg") for p in engine.module.parameters()]
    engine.backward(engine(torch.randn(1, 64)).pow(2).mean())
    engine.step()
    sizes = [safe_get_local_fp32_param(p).numel() for p in engine.module.parameters()]
    state = [safe_get_local_optimizer_state(p, "exp_avg").numel() for p in engine.module.parameters()]
    parts = zip(engine.module.parameters(), sizes, strict=True)
    unknown = [safe_get_local_optimizer_state(p, "nothing") for p, size in parts if size]
    engine.destroy()
    return [first, sizes, state, unknown]


def test_the_state_of_an_empty_part_is_empty() -> None:
    for first, sizes, state, unknown in run_ranks(narrow, 2):
        assert first == [None] * 4 and sizes == state and 0 in sizes and set(unknown) == {None}


@on_ranks(2)
def test_arguments_and_errors_of_the_api() -> None:
    engine = build(1, net())
    loss = engine(torch.ones(1, 8))
    for call in (engine.scale, engine.backward):
        with pytest.raises(AssertionError, match="scalar tensor"):
            call(loss)
    assert engine.scale(loss.sum()) is not None
    whole = engine.module_state_dict()
    before = engine.module_state_dict()["2.bias"]
    del whole["2.bias"]
    with pytest.raises(CheckpointError, match=r"missing: 2\.bias"):
        engine.load_module_state_dict(whole, allowed_missing_keys=["2.weight"])
    whole["0.bias"].fill_(0.25)
    engine.load_module_state_dict(whole, allowed_missing_keys=["2.bias"])
    now = engine.module_state_dict()
    assert torch.equal(now["2.bias"], before) and bool((now["0.bias"] == 0.25).all())
    engine.destroy()
