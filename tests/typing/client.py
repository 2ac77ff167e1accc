"""A typed client. `make lint` checks it: where a mistake below is not found, its `type: ignore` is unused, an error."""

from __future__ import annotations

import torch
from torch import nn
from typing_extensions import assert_type

import shardwise
from shardwise import Engine
from shardwise.data import EngineDataLoader


def train(model: nn.Module, batch: torch.Tensor) -> float | None:
    engine, _, loader, _ = shardwise.initialize(model=model, config={"train_batch_size": 4})
    assert_type(engine, Engine)
    assert_type(shardwise.initialize(model, torch.optim.SGD, config="config.json").engine, Engine)
    assert_type(loader, EngineDataLoader | None)
    assert_type(engine.device, torch.device)
    assert_type(engine.global_steps, int)
    assert_type(engine.save_checkpoint("directory"), bool)
    assert_type(shardwise.comm.get_rank(), int)
    with shardwise.zero.GatheredParameters([engine.module.weight]):
        shardwise.utils.safe_get_full_grad(nn.Linear(1, 1).weight)
    engine.backward(engine(batch).mean())
    engine.step()
    return engine.get_global_grad_norm()


def mistakes(model: nn.Module, engine: Engine) -> None:
    shardwise.initialize(modle=model, config={})  # type: ignore[call-arg]
    shardwise.initialize(model=model)  # type: ignore[call-arg]
    shardwise.initialize(model=3, config={})  # type: ignore[arg-type]
    shardwise.initialize(model, config=3)  # type: ignore[arg-type]
    shardwise.initialize(model, config={}, mesh="tp")  # type: ignore[arg-type]
    print(shardwise.initialize(model, config={}).engin)  # type: ignore[attr-defined]
    shardwise.initialise(model=model)  # type: ignore[attr-defined]
    engine.stepp()  # type: ignore[operator]
    engine.save_checkpoint(directory="x")  # type: ignore[call-arg]
    shardwise.comm.all_reduce(torch.zeros(1), opp=None)  # type: ignore[call-arg]
    shardwise.comm.all_reduces(torch.zeros(1))  # type: ignore[attr-defined]
    shardwise.utils.safe_get_gradient(model)  # type: ignore[attr-defined]
    shardwise.checkpoint.exports("x")  # type: ignore[attr-defined]
