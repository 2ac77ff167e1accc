"""A typed client of the drop-in; see `client`."""

from __future__ import annotations

import argparse

import deepspeed
import torch
from deepspeed.ops.adam import FusedAdam
from deepspeed.runtime.constants import TRAIN_BATCH_SIZE
from torch import nn
from typing_extensions import assert_type


def train(args: argparse.Namespace, model: nn.Module, batch: torch.Tensor) -> None:
    engine, *_ = deepspeed.initialize(args=args, model=model, optimizer=FusedAdam(model.parameters(), lr=0.1))
    assert_type(engine, deepspeed.DeepSpeedEngine)
    assert_type(deepspeed.comm.get_rank(), int)
    assert_type(TRAIN_BATCH_SIZE, str)
    engine.backward(engine(batch).mean())
    engine.step()
    with deepspeed.zero.GatheredParameters([engine.module.weight]):
        print(engine.zero_optimization_stage(), engine.train_batch_size())


def mistakes(model: nn.Module, engine: deepspeed.DeepSpeedEngine) -> None:
    deepspeed.initialize(modle=model)  # type: ignore[call-arg]
    deepspeed.initialize(model=3)  # type: ignore[arg-type]
    deepspeed.initialise(model=model)  # type: ignore[attr-defined]
    engine.stepp()  # type: ignore[operator]
    engine.save_checkpoint(directory="x")  # type: ignore[call-arg]
    deepspeed.comm.all_reduces(torch.zeros(1))  # type: ignore[attr-defined]
    FusedAdam(model.parameters(), learning_rate=0.1)  # type: ignore[call-arg]
