"""One CUDA device: every stage trains to the same parameters, close to a plain loop, in all precisions."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardwise


def train(stage: int, precision: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(33, 65), nn.GELU(), nn.Linear(65, 7))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    }
    if precision != "fp32":
        config[precision] = {"enabled": True}
    engine, *_ = shardwise.initialize(model=model, config=config)
    dtype = next(model.parameters()).dtype
    for step in range(4):
        x = torch.randn(4, 33, generator=torch.Generator().manual_seed(step)).to(engine.device, dtype)
        engine.backward(engine(x).float().square().mean())
        engine.step()
    values = {name: p.detach().float().cpu() for name, p in model.named_parameters()}
    engine.destroy()
    return values


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_stages_agree_to_the_bit(precision: str) -> None:
    first = train(0, precision)
    for stage in (1, 2, 3):
        other = train(stage, precision)
        assert all(torch.equal(first[name], other[name]) for name in first)
