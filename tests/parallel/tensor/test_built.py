"""Models that are not built plainly: no rank makes more of a divided tensor than its part."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import shardwise
from tests.harness import run_ranks
from tests.parallel.tensor.models import ROWS, RULES, Decoder, data, decoder

CONFIG = {
    "train_micro_batch_size_per_gpu": ROWS,
    "tensor_parallel": {"autotp_size": 2, "partition_config": RULES},
    "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def built(how: str) -> Any:
    """Losses of two steps of a model that is built in another way, on ranks that draw other numbers."""
    torch.manual_seed(0 if how != "meta" else dist.get_rank())
    if how == "init":
        with shardwise.zero.Init():
            model = Decoder(True)
    elif how == "meta":
        with torch.device("meta"):
            model = Decoder(True)
        torch.manual_seed(0)
    else:
        model = decoder(True)
    engine, *_ = shardwise.initialize(model=model, config=CONFIG)
    whole = {name: value.clone() for name, value in (engine.module_state_dict() or {}).items()}
    copy = engine.get_data_parallel_rank()
    losses = []
    for step in range(2):
        loss = engine(data(step, engine.dp_world_size * ROWS)[copy * ROWS : (copy + 1) * ROWS])
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    here = sum(tensor.numel for tensor in engine.sharded.registry)
    engine.destroy()
    return losses, here, whole


def test_zero_init_gives_the_same_model() -> None:
    for found, plain in zip(run_ranks(built, 4, "init"), run_ranks(built, 4, "plain"), strict=True):
        assert found[:2] == plain[:2]
        assert all(torch.equal(found[2][name], value) for name, value in plain[2].items())


def test_models_on_the_meta_device_are_initialised_whole_and_divided() -> None:
    found = run_ranks(built, 2, "meta")
    assert found[0][:2] == found[1][:2]
    weight = found[0][2]["blocks.0.up.weight"]
    assert weight.abs().max() <= 0.25 and weight[12:].std() > 0.1  # both halves are drawn, as those of 16 inputs are
