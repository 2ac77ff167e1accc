"""What scripts written against the API call, and what they get where a rank has nothing, or a call means nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardwise.errors import CheckpointError
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
