"""One CUDA device: training is that of a plain loop, in all precisions. Stages differ on several devices only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardwise
from shardwise.errors import UsageError
from tests.harness.training import DTYPES


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 33, generator=torch.Generator().manual_seed(step))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(33, 65), nn.GELU(), nn.Linear(65, 7))


def train(precision: str) -> dict[str, torch.Tensor]:
    model = net()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-4}},
    }
    if precision != "fp32":
        config[precision] = {"enabled": True, **({"loss_scale": 256} if precision == "fp16" else {})}
    engine, *_ = shardwise.initialize(model=model, config=config)
    for step in range(4):
        engine.backward(engine(batch(step).to(engine.device, DTYPES[precision])).float().square().mean())
        engine.step()
    values = {name: p.detach().float().cpu() for name, p in model.named_parameters()}
    engine.destroy()
    return values


def plain(precision: str) -> dict[str, torch.Tensor]:
    """The same with masters in fp32 and torch's optimizer."""
    device, dtype = torch.device("cuda"), DTYPES[precision]
    model = net().to(device)
    masters = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    model = model.to(dtype)
    optimizer = torch.optim.AdamW(masters, lr=1e-2, eps=1e-4, weight_decay=0.0)
    for step in range(4):
        model(batch(step).to(device, dtype)).float().square().mean().backward()
        for p, master in zip(model.parameters(), masters, strict=True):
            assert p.grad is not None
            master.grad, p.grad = p.grad.float(), None
        nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        for p, master in zip(model.parameters(), masters, strict=True):
            p.data.copy_(master)
    return {name: p.detach().float().cpu() for name, p in model.named_parameters()}


@pytest.mark.parametrize("precision", list(DTYPES))
def test_training_is_that_of_a_plain_loop(precision: str) -> None:
    found, expected, start = train(precision), plain(precision), net().state_dict()
    for name, value in found.items():
        moved = float((expected[name] - start[name]).norm())
        assert float((value - expected[name]).norm()) < (1e-3 if precision == "fp32" else 0.1) * moved, name


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
