"""Units are the same on all ranks, also where ranks have parts of different sizes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardwise
from tests.harness import run_ranks


class Uneven(nn.Module):
    """With 9 words over two ranks, one has as many elements of the words as of `mid`, and the other has not."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.words, self.mid = nn.Embedding(words, 4), nn.Linear(4, 4, bias=False)
        self.norm, self.big = nn.LayerNorm(4), nn.Linear(4, 10, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.big(self.norm(self.mid(self.words(ids)))).pow(2).mean()


def trained(stage: int, ranks: int) -> list[float]:
    torch.manual_seed(0)
    rules = [{"patterns": [r"words\.weight$"], "partition_type": "column"}]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 17},
        "tensor_parallel": {
            "autotp_size": ranks,
            "partition_config": {"use_default_specs": False, "layer_specs": rules},
        },
    }
    engine = shardwise.initialize(model=Uneven(9), config=config)[0]
    losses = []
    for _ in range(3):
        losses.append(engine(torch.arange(9)))
        engine.backward(losses[-1])
        engine.step()
    engine.destroy()
    return [loss.item() for loss in losses]


@pytest.mark.parametrize("stage", [1, 3])
def test_words_that_do_not_divide_evenly_are_trained_as_on_one_rank(stage: int) -> None:
    expected = pytest.approx(run_ranks(trained, 1, stage, 1)[0], rel=1e-5)
    assert run_ranks(trained, 2, stage, 2) == [expected] * 2
