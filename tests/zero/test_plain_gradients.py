"""Gradients of an engine without an optimizer: sums or means over ranks in `.grad`, added up over backward passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise.errors import UsageError
from tests.harness import on_ranks
from tests.harness.training import engine_of


class Branches(nn.Module):
    """The third layer is used by rank 1 only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second, self.third = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        hidden = self.first(x).tanh()
        return (self.second(hidden) + (self.third(hidden) if rank else 0)).square().sum()


def batch(rank: int, number: int) -> torch.Tensor:
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * number + rank))


def made(op: str) -> Any:
    return engine_of(Branches(), 0, gradient_allreduce_op=op)


def expected(op: str, schedule: str) -> list[torch.Tensor | None]:
    model = Branches()
    for number, action in enumerate(schedule):
        if action == "z":
            model.zero_grad()
        else:
            for rank in range(2):
                (model(batch(rank, number), rank) / (2 if op == "mean" else 1)).backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("schedule", "clears", "op"),
    [
        ("b", "none", "sum"),
        ("bbb", "zeros", "mean"),
        ("ppb", "none", "sum"),
        ("bpb", "zeros", "mean"),
        ("bzb", "none", "sum"),
        ("pzb", "zeros", "mean"),
        ("bpzpbb", "none", "sum"),
    ],
)
@on_ranks(2)
def test_gradients_are_added_up(op: str, schedule: str, clears: str) -> None:
    """A schedule is of backward passes ("p": inside of no_sync) and of gradients that are cleared ("z")."""
    engine, rank = made(op), dist.get_rank()
    for number, action in enumerate(schedule):
        if action == "z":
            for parameter in engine.module.parameters():
                if clears == "none":
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad.zero_()
        elif action == "p":
            with engine.no_sync():
                engine.backward(engine(batch(rank, number), rank))
        else:
            engine.backward(engine(batch(rank, number), rank))
    found = [None if p.grad is None else p.grad.clone() for p in engine.module.parameters()]
    for mine, wanted in zip(found, expected(op, schedule), strict=True):
        assert mine is not None and wanted is not None
        assert torch.allclose(mine, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("op", ["mean", "sum"])
@on_ranks(2)
def test_parameters_that_require_gradients_later(op: str) -> None:
    model, rank = Branches(), dist.get_rank()
    model.second.requires_grad_(False)
    engine = engine_of(model, 0, gradient_allreduce_op=op)
    engine.backward(engine(batch(rank, 0), rank))
    assert model.second.weight.grad is None
    model.second.requires_grad_(True)
    model.zero_grad()
    engine(batch(rank, 0), rank).backward()
    for parameter, wanted in zip(engine.module.parameters(), expected(op, "b"), strict=True):
        assert torch.allclose(parameter.grad, wanted, rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_a_parameter_frozen_within_a_window_is_averaged_with_it() -> None:
    model, rank = Branches(), dist.get_rank()
    engine = engine_of(model, 0)
    with engine.no_sync():
        engine.backward(engine(batch(rank, 0), rank))
    model.first.requires_grad_(False)
    engine.backward(engine(batch(rank, 1), rank))
    for parameter in model.first.parameters():
        grads = [torch.empty_like(parameter) for _ in range(2)]
        dist.all_gather(grads, parameter.grad)
        assert torch.equal(*grads)


@on_ranks(2)
def test_local_gradients_that_a_script_changes_are_refused() -> None:
    engine, rank = made("sum"), dist.get_rank()
    with engine.no_sync():
        engine.backward(engine(batch(rank, 0), rank))
    for parameter in engine.module.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)
    with pytest.raises(UsageError, match=r"changed between backward passes inside of no_sync"):
        engine.backward(engine(batch(rank, 1), rank))


@pytest.mark.parametrize("op", ["sum", "mean"])
@on_ranks(2)
def test_sparse_gradients_become_dense(op: str) -> None:
    torch.manual_seed(3)
    model = nn.ModuleList([nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1, bias=False)])
    start, (table, layer) = [p.detach().clone() for p in model.parameters()], model
    model.forward = lambda ids: layer(table(ids) if len(ids) else torch.ones(1, 2)).sum()  # type: ignore[method-assign]
    engine = engine_of(model, 0, gradient_allreduce_op=op)
    for _ in range(2):
        engine.backward(engine(torch.tensor([1, 1, 3][: 3 * dist.get_rank()], dtype=torch.long)))
    counts = torch.tensor([0.0, 2, 0, 1]) * (2 if op == "sum" else 1)
    assert torch.allclose(table.weight.grad, counts[:, None] * start[1])
