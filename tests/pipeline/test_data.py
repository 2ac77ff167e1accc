"""Data of pipelines: labels of the last stage belong to the inputs of the first, for every source of batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.pipe import LayerSpec, PipelineModule
from tests.harness import of_all_ranks, on_ranks, thorough


class Echo(nn.Module):
    """Returns its input, and has a parameter that changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.0 * self.weight


def distance(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (output - labels).abs().sum()


@pytest.mark.parametrize("source", ["training_data", thorough("deepspeed_io")])
@on_ranks(4)
def test_labels_belong_to_inputs(source: str) -> None:
    """deepspeedai/DeepSpeed#5729: outputs met labels of another batch. Here also if ranks have different seeds."""
    torch.manual_seed(dist.get_rank())
    samples = [(torch.full((1,), float(n)), torch.full((1,), float(n))) for n in range(32)]
    model = PipelineModule([LayerSpec(Echo) for _ in range(4)], num_stages=2, loss_fn=distance)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
    }
    data: Any = samples if source == "training_data" else None
    engine, _, _, _ = shardwise.initialize(model=model, config=config, training_data=data)
    if source == "deepspeed_io":
        engine.set_dataloader(engine.deepspeed_io(samples))
    seen: list[float] = []
    engine.set_batch_fn(lambda pair: (seen.extend(pair[0].flatten().tolist()), pair)[1])
    losses = [float(engine.train_batch()) for _ in range(6)]
    assert [*losses, float(engine.eval_batch())] == [0.0] * 7
    engine.destroy()
    first, second, *others = of_all_ranks(seen)
    assert others == [first, second] and sorted(first[:16] + second[:16]) == list(range(32))
