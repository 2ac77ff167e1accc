"""Backward passes in two parts: gradients are those of one pass, bit by bit, and hooks run once."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from shardwise.errors import PipelineError
from shardwise.pipeline.split_backward import DeferredWeights


class Mixed(nn.Module):
    """Operators with several outputs, shared weights, weights used by hand, and all functions that are split."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, 16), nn.LayerNorm(16)
        self.second, self.twice = nn.Linear(16, 8, bias=False), nn.Linear(8, 8)
        self.conv, self.gpt = nn.Conv1d(3, 3, 3, padding=1), Conv1D(8, 8)
        self.gain, self.frozen = nn.Parameter(torch.ones(8)), nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.first(x).chunk(2, -1)
        x = self.second(self.norm(torch.cat([a, b.relu()], -1)))
        x = self.twice(self.twice(x) * self.gain + x)
        x = self.conv(self.frozen(x))
        one, *others = self.gpt(x).split(2, -1)
        return torch.cat([one, *others[::-1]], -1) @ self.twice.weight + F.linear(
            x, weight=self.second.weight.T[:8, :8]
        )


def gradients(model: nn.Module, x: torch.Tensor, gradient: torch.Tensor, *, split: bool) -> tuple[list[str], list[str]]:
    """Run a forward and backward pass; return the parameters whose hooks ran in its first and second part."""
    calls: list[str] = []
    handles = [
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: calls.append(name))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    deferred = DeferredWeights()
    if split:
        with deferred.collecting():
            output = model(x)
    else:
        output = model(x)
    output.backward(gradient)
    first = list(calls)
    torch.autograd.backward(deferred.take())
    for handle in handles:
        handle.remove()
    return first, calls[len(first) :]


def test_gradients_of_both_parts_are_those_of_one_pass() -> None:
    torch.manual_seed(0)
    model, x, gradient = Mixed(), torch.randn(2, 3, 8, requires_grad=True), torch.randn(2, 3, 8)
    everything, _ = gradients(model, x, gradient, split=False)
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    inputs = x.grad.clone()
    model.zero_grad()
    x.grad = None
    first, second = gradients(model, x, gradient, split=True)
    assert torch.equal(x.grad, inputs)
    assert {"first.weight", "first.bias", "conv.weight", "gpt.weight"} <= set(second)
    assert {"norm.weight", "gain"} <= set(first)
    # A weight that is also used by an operator that is not split gets a gradient in both parts.
    assert set(first) | set(second) == set(everything)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            exact = name not in set(first) & set(second)
            assert (
                torch.equal(parameter.grad, expected[name]) if exact else torch.allclose(parameter.grad, expected[name])
            )


def test_inputs_without_a_gradient_and_recomputation() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    x, gradient = torch.randn(3, 4), torch.randn(3, 2)

    def run(split: bool) -> list[torch.Tensor]:
        model.zero_grad()
        deferred = DeferredWeights()
        with deferred.collecting() if split else torch.enable_grad():
            output = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
        output.backward(gradient)
        if split:
            torch.autograd.backward(deferred.take())
        return [parameter.grad.clone() for parameter in model.parameters()]

    for found, expected in zip(run(True), run(False), strict=True):
        assert torch.equal(found, expected)


def test_the_first_part_keeps_inputs_and_gradients_only() -> None:
    model, deferred = nn.Linear(64, 64, bias=False), DeferredWeights()
    x = torch.randn(8, 64, requires_grad=True)
    with deferred.collecting():
        output = model(x)
    values = weakref.ref(output)
    torch.autograd.backward(output, torch.ones_like(output))
    del output
    assert values() is None
    (root,) = deferred.take()
    assert deferred.take() == []
    torch.autograd.backward([root])
    assert torch.equal(model.weight.grad, x.sum(0).expand(64, 64))


def test_gradients_of_gradients_are_refused() -> None:
    model, deferred = nn.Linear(4, 4), DeferredWeights()
    x = torch.randn(2, 4, requires_grad=True)
    with deferred.collecting():
        output = model(x)
    with pytest.raises(PipelineError, match='Use the schedule "1f1b"'):
        torch.autograd.grad(output.sum(), x, create_graph=True)
