"""Tracked activations against arithmetic by hand, and a worked example of the four sources of memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise.memory import Accountant, Category, module_bytes, plan_activations, track_activations

A = Category.ACTIVATIONS


def dense() -> nn.Sequential:
    """Four layers, as in a well-known introduction to where training memory goes."""
    return nn.Sequential(nn.Linear(512, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 512))


def test_worked_example_of_model_and_activation_memory() -> None:
    model = dense()
    assert module_bytes(model) == 12_597_248
    inputs = torch.randn(4, 512)
    with track_activations(Accountant()) as accountant:
        outputs = model(inputs)
    assert outputs.shape == (4, 512)
    # The example adds the inputs, which were made before.
    assert accountant.live[A] + inputs.nbytes == 65_536


@pytest.mark.parametrize(("optimizer", "factor"), [("SGD", 0), ("momentum", 1), ("Adam", 2)])
def test_worked_example_in_the_report(optimizer: str, factor: int) -> None:
    name, params = ("SGD", {"momentum": 0.9}) if optimizer == "momentum" else (optimizer, {})
    engine, *_ = shardwise.initialize(
        model=dense(), config={"train_batch_size": 4, "optimizer": {"type": name, "params": {"lr": 1e-3, **params}}}
    )
    report = engine.memory_report()
    model = 12_597_248
    assert report.row(Category.PARAMETERS).planned == model
    assert report.row(Category.GRADIENTS).planned == model
    state = report.row(Category.OPTIMIZER)
    assert state.floor is not None
    assert state.floor - 64 <= factor * model <= state.floor  # but for step counts
    engine.backward(engine(torch.randn(4, 512)).square().mean())
    engine.step()
    after = engine.memory_report()
    for category in (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER):
        assert after.row(category).measured == report.row(category).planned, category
    engine.destroy()


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


def measured(model: nn.Module, x: torch.Tensor) -> int:
    """One pass as the engine makes it: a gradient is gone as soon as it is there."""
    hooks = [p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None)) for p in model.parameters()]
    with track_activations(Accountant()) as accountant:
        model(x).square().mean().backward()
    for hook in hooks:
        hook.remove()
    return accountant.peak[A]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plan_is_the_measurement(recompute: bool, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(16, 32), *(Block(32, recompute) for _ in range(3)), nn.LayerNorm(32)).to(dtype)
    x = torch.randn(6, 16, dtype=dtype)
    plan = plan_activations(model, x, loss=lambda out: out.square().mean())
    assert plan.peak == measured(model, x)
    assert len(plan.stretches) == 1 + len(list(model.parameters()))


def test_recomputation_lowers_the_plan() -> None:
    peaks = [
        plan_activations(nn.Sequential(*(Block(32, recompute) for _ in range(6))), torch.randn(64, 32)).peak
        for recompute in (False, True)
    ]
    assert peaks[1] < peaks[0] / 2


def test_planning_leaves_no_trace() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    calls: list[int] = []
    hook = model[0].register_forward_hook(lambda *_: calls.append(1))
    plan_activations(model, torch.randn(4, 8), own_hooks={hook.id})
    assert not calls
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_planning_keeps_the_random_state() -> None:
    x = torch.randn(4, 8)
    torch.manual_seed(3)
    plan_activations(nn.Dropout(0.5), x.requires_grad_())
    drawn = torch.rand(3)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(3))


def test_planning_runs_hooks_of_others_and_dtypes_of_the_engine() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    seen = []
    model[0].register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    half = plan_activations(
        model, torch.ones(8, 64, dtype=torch.bfloat16), dtypes={id(p): torch.bfloat16 for p in model.parameters()}
    )
    full = plan_activations(model, torch.ones(8, 64))
    assert seen == [torch.bfloat16, torch.float32]
    assert half.peak < 0.6 * full.peak


class DataDependent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) if x.sum().item() > 0 else x


def test_a_module_that_needs_values_is_reported_as_not_planned() -> None:
    with pytest.raises(DataDependentOutputException):
        plan_activations(DataDependent(), torch.ones(2, 4))
    engine, *_ = shardwise.initialize(
        model=DataDependent(), config={"train_batch_size": 2, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}
    )
    report = engine.memory_report(torch.ones(2, 4))
    row = report.row(Category.ACTIVATIONS)
    assert row.planned is None and row.floor is None
    assert any(note.startswith("Activations not planned") for note in report.notes)
    assert "-" in report.render()
    engine.destroy()
