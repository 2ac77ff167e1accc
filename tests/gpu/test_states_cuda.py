"""One CUDA device: state leaves it between steps, its memory is free meanwhile, and training goes on bit by bit."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

import shardwise
from tests.harness.training import ADAMW

CONFIGS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}},
    "bf16, stage 3": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}},
    "optimizer on the host": {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    },
}


def train(config: dict[str, Any], **moving: Any) -> tuple[list[float], list[int]]:
    """Losses of some steps, and what torch holds on the device while state is away."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(2048, 2048), nn.GELU())))
    engine = shardwise.initialize(model=model, config={"train_batch_size": 32, "optimizer": ADAMW, **config})[0]
    dtype = next(model.parameters()).dtype
    losses, away = [], []
    for step in range(4):
        torch.manual_seed(step)
        loss = engine(torch.randn(32, 2048, device="cuda", dtype=dtype)).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
        del loss
        if moving:
            engine.offload_states(**moving)
            away.append(torch.cuda.memory_allocated())
            # What somebody else writes there meanwhile.
            other = torch.full((64 << 20,), 7.0, device="cuda")
            del other
            engine.reload_states(non_blocking=moving["non_blocking"])
    engine.destroy()
    del engine, model
    gc.collect()
    return losses, away


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("non_blocking", [False, True])
@pytest.mark.parametrize("pin_memory", [False, True])
def test_the_same_losses_and_a_free_device(name: str, non_blocking: bool, pin_memory: bool) -> None:
    plain, _ = train(CONFIGS[name])
    before = torch.cuda.memory_allocated()  # workspaces of cuBLAS among it
    moved, away = train(CONFIGS[name], non_blocking=non_blocking, pin_memory=pin_memory)
    assert moved == plain
    assert max(away) - before < 32 << 20  # one fp32 copy of the model takes 64 MiB
