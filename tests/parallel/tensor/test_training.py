"""Tensor parallelism against one process: losses, gradients and parameters, under every ZeRO stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

import shardwise
from tests.harness import run_ranks, thorough
from tests.parallel.tensor.models import ROWS, RULES, alone, check, decoder, trained

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
    found = trained(engine, STEPS)
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [thorough(0), 1, thorough(2), thorough(3)])
@pytest.mark.parametrize(("world", "size"), [thorough(2, 2), (4, 2), thorough(4, 4)])
@pytest.mark.parametrize("tied", [thorough(False), True])
def test_training_is_that_of_one_process(stage: int, world: int, size: int, tied: bool) -> None:
    expected = alone(STEPS, world // size, tied=tied)
    for found in run_ranks(train, world, stage, size, tied):
        assert len(found[2]) == len(expected[2])
        check(found, expected)
