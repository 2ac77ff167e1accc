"""Tensor parallelism against one process: losses, gradients and parameters, under every ZeRO stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise
from tests.harness import run_ranks
from tests.parallel.tensor.models import ROWS, RULES, alone, data, decoder

STEPS = 20


def config(stage: int, size: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "tensor_parallel": {"autotp_size": size, "partition_config": RULES},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **more,
    }


def train(stage: int, size: int, tied: bool) -> Any:
    engine, *_ = shardwise.initialize(
        model=decoder(tied, seed=dist.get_rank()), config=config(stage, size, gradient_clipping=1e9)
    )
    copy = engine.get_data_parallel_rank()
    losses = []
    for step in range(STEPS):
        loss = engine(data(step, engine.dp_world_size * ROWS)[copy * ROWS : (copy + 1) * ROWS])
        mean = loss.detach().double()
        dist.all_reduce(mean)
        losses.append(float(mean) / dist.get_world_size())
        engine.backward(loss)
        engine.step()
    norm = float(engine.get_global_grad_norm())
    with shardwise.zero.GatheredParameters(list(engine.module.parameters())):
        registry = engine.sharded.registry
        parts = {t.name: (t, p.detach().clone()) for t, p in zip(registry, registry.parameters, strict=True)}
    engine.destroy()
    return losses, norm, parts


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("world", "size"), [(2, 2), (4, 2), (4, 4)])
@pytest.mark.parametrize("tied", [False, True])
def test_training_is_that_of_one_process(stage: int, world: int, size: int, tied: bool) -> None:
    losses, grads, exact = alone(STEPS, world // size, tied=tied)
    norm = torch.stack([grad.norm() for grad in grads.values()]).norm()
    for found in run_ranks(train, world, stage, size, tied):
        assert found[0] == pytest.approx(losses, rel=1e-5)
        assert found[1] == pytest.approx(float(norm), rel=1e-4)
        for name, (_tensor, value) in found[2].items():
            whole = exact[name]
            assert (value - whole).norm() <= 1e-5 * whole.norm(), name
