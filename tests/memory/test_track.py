"""Tracked activations against arithmetic by hand, and a worked example of the four sources of memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwise.memory import Accountant, Category, track_activations
from tests.harness.training import ADAMW, engine_of

A = Category.ACTIVATIONS


def dense() -> nn.Sequential:
    """Four layers, as in a well-known introduction to where training memory goes."""
    return nn.Sequential(nn.Linear(512, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 512))


def test_views_and_inputs_are_not_counted_twice() -> None:
    x = torch.ones(8, 8)
    with track_activations(Accountant()) as accountant:
        y = x * 2
        z = y.t()[:4].reshape(2, 16)  # the last one copies
        x.add_(1)
        kept = (y.view(-1), z)
    assert accountant.live[A] == 8 * 8 * 4 + 4 * 8 * 4
    assert len(kept) == 2


def test_backward_frees_what_forward_saved() -> None:
    model, x = dense(), torch.randn(4, 512)
    with track_activations(Accountant()) as accountant:
        loss = model(x).square().sum()
        saved = accountant.live[A]
        loss.backward()
        for parameter in model.parameters():
            parameter.grad = None
        del loss
    assert saved > 0
    assert accountant.live[A] == 0
    assert accountant.peak[A] >= saved


class Block(nn.Module):
    def __init__(self, width: int, recompute: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width))
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (checkpoint(self.net, x, use_reentrant=False) if self.recompute else self.net(x))


def planned(model: nn.Module, x: torch.Tensor, *, bf16: bool = False) -> tuple[int, int]:
    """Activations as planned, and in a step."""
    engine = engine_of(model, 0, ADAMW, train_batch_size=6, bf16={"enabled": bf16})
    report = engine.memory_report(x, loss=lambda out: out.square().mean())
    for _ in range(2):
        engine.accountant.reset_peak()
        with track_activations(engine.accountant):
            engine.backward(engine(x).square().mean())
            engine.step()
    found = report.row(A).planned
    assert found is not None
    engine.destroy()
    return found, engine.accountant.peak[A]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("bf16", [False, True])
def test_plan_is_the_measurement(recompute: bool, bf16: bool) -> None:
    model = nn.Sequential(nn.Linear(16, 32), *(Block(32, recompute) for _ in range(3)), nn.LayerNorm(32))
    x = torch.randn(6, 16, dtype=torch.bfloat16 if bf16 else torch.float32)
    found, measured = planned(model, x, bf16=bf16)
    assert abs(found - measured) <= 0.03 * measured


def test_planning_leaves_no_trace() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    engine = engine_of(model, 0, ADAMW, train_batch_size=6)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    assert engine.memory_report(torch.randn(4, 8).requires_grad_()).row(A).planned
    torch.manual_seed(3)
    torch.randn(4, 8)
    drawn = torch.rand(3)
    torch.manual_seed(3)
    batch = torch.randn(4, 8)
    engine.memory_report(batch)
    assert torch.equal(drawn, torch.rand(3))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not engine.optimizer.state and not list(engine.accountant.live.values())[1]
    engine.destroy()
