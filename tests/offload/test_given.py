"""Optimizers under the names that scripts use where state is offloaded: the same bits as on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise
from shardwise_deepspeed import optimizers
from tests.harness import on_ranks, thorough
from tests.harness.training import masters
from tests.models import CASES

HOST = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}


def losses(name: str, zero: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    case = CASES["gpt"]
    model = case.make()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, **zero},
        "zero_force_ds_cpu_optimizer": True,
    }
    given = None
    if hasattr(optimizers, name):
        given = getattr(optimizers, name)(model.parameters(), lr=1e-2, weight_decay=0.01)
    else:
        config["optimizer"] = {"type": name, "params": {"lr": 1e-2, "weight_decay": 0.01}}
    engine, optimizer, *_ = shardwise.initialize(model=model, optimizer=given, config=config)
    assert given is None or optimizer is given
    found = []
    for step in range(3):
        loss = case.loss(engine, case.data(step, 0, dist.get_rank(), torch.bfloat16))
        engine.backward(loss)
        engine.step()
        found.append(float(loss.detach()))
    whole = masters(model)
    engine.destroy()
    return found, whole


@pytest.mark.parametrize(
    "name", [*map(thorough, ("AdamW", "Adam", "DeepSpeedCPUAdam", "DeepSpeedCPUAdagrad")), "DeepSpeedCPULion"]
)
@on_ranks(2)
def test_the_same_bits(name: str) -> None:
    (plain, before), (moved, after) = losses(name, {}), losses(name, HOST)
    assert plain == moved and all(torch.equal(after[key], value) for key, value in before.items())
