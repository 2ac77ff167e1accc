"""One CUDA device: every stage trains to the same parameters, close to a plain loop, in all precisions."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardwise
from shardwise.errors import UsageError


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


def weighted(on_device: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(33, 7)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "torch_autocast": {"enabled": True},
    }
    engine, *_ = shardwise.initialize(model=model, config=config)
    x = torch.randn(4, 33, generator=torch.Generator().manual_seed(1)).to(engine.device)
    for micro in range(4):
        weight = torch.tensor(3 + micro, device=engine.device) if on_device else 3 + micro
        out = engine(x * (micro + 1))
        assert out.dtype is torch.bfloat16
        engine.backward(out.float().square().mean(), weight=weight)
        engine.step()
    assert float(engine.last_step.weight) == 5 + 6
    values = [p.detach().cpu() for p in model.parameters()]
    engine.destroy()
    return values


def test_weights_may_be_on_the_device() -> None:
    for given, seen in zip(weighted(True), weighted(False), strict=True):
        assert torch.allclose(given, seen, rtol=1e-6, atol=1e-7)


def test_mixed_weights_are_refused_at_the_next_step_where_nobody_waits_for_the_device() -> None:
    engine, *_ = shardwise.initialize(
        model=nn.Linear(3, 1),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        },
    )
    for weight in (2.0, None):
        engine.backward(engine(torch.ones(2, 3, device=engine.device)).mean(), weight=weight)
        engine.step()
    with pytest.raises(UsageError, match="of the 2 backward passes of this window on all ranks, 1 had a weight"):
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 3, device=engine.device)).mean())
            engine.step()
    engine.destroy()
