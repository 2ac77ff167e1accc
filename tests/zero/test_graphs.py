"""Graphs that a backward pass enters elsewhere than through the outputs of modules, and graphs that are differentiated
twice: gradients are those of plain PyTorch, at every stage.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwise.errors import ReleasedParameterError
from tests.harness import of_all_ranks, on_ranks, thorough
from tests.harness.training import Outcome, Setting, assert_close, assert_identical, plain, start, train
from tests.models import Batch, Case, regression, squared

DIM = 6
STEPS = 2


class Gate(nn.Module):
    """Keeps a loss of its own, computed from the module's weights, on the module."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)
        self.scale = nn.Parameter(torch.rand(DIM) + 0.5)
        self.route = nn.Parameter(torch.rand(DIM) + 0.5)
        self.fixed = nn.Parameter(torch.rand(DIM) + 0.5, requires_grad=not frozen)
        self.aux = self.hidden = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.hidden = self.inner(x)
        y = (self.hidden * self.scale).tanh()
        out = x + y * self.fixed
        self.aux = (y * self.route * self.fixed).square().mean()
        return out


class Gates(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Gate(frozen="frozen" in way) for _ in range(4))
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if "checkpoint" in self.way else block(x)
        return x


class Lent(nn.Module):
    """Recomputes with a weight that belongs to another module."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Gate(frozen=False) for _ in range(4))

    def borrow(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.blocks[2].inner.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(self.borrow, block(x), use_reentrant=False)
        return x


class Field(nn.Module):
    """Returns the gradient of an energy with respect to its input, as models of forces do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Gates("field")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_(True)
        (force,) = torch.autograd.grad(self.body(x).square().sum(), x, create_graph=True)
        return force


def blocks(model: Any) -> Any:
    return getattr(model, "module", model).blocks


def auxiliary_loss(model: Any, batch: Batch) -> torch.Tensor:
    loss = squared(model(batch["x"]), batch["y"])
    return loss + sum(block.aux for block in blocks(model))


def auxiliary_alone(model: Any, batch: Batch) -> torch.Tensor:
    """The model's output is not used."""
    model(batch["x"])
    return sum(block.aux for block in blocks(model))  # type: ignore[no-any-return]


def caught_activation(model: Any, batch: Batch) -> torch.Tensor:
    """The loss depends on what a block has computed in the middle, not on what it has returned."""
    model(batch["x"])
    return squared(blocks(model)[2].hidden, batch["y"])


def gradient_penalty(model: Any, batch: Batch) -> torch.Tensor:
    x = batch["x"].requires_grad_(True)
    out = model(x)
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return squared(out, batch["y"]) + gradient.square().mean()


def weight_penalty(model: Any, batch: Batch) -> torch.Tensor:
    """The gradient of some parameters is handed out, and differentiated again."""
    loss = squared(model(batch["x"]), batch["y"])
    some = [blocks(model)[1].inner.weight, blocks(model)[1].scale, blocks(model)[3].inner.bias]
    return loss + sum(g.square().sum() for g in torch.autograd.grad(loss, some, create_graph=True))


def weight_gradient(model: Any, batch: Batch) -> torch.Tensor:
    """The gradient of all parameters is handed out, and nothing comes of it."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    looked_at = squared(model(batch["x"]), batch["y"])
    torch.autograd.grad(looked_at, parameters, materialize_grads=True)
    return squared(model(batch["x"]), batch["y"])


def auxiliary_by_rank(model: Any, batch: Batch) -> torch.Tensor:
    """Which blocks' losses count depends on the data, so that ranks enter the graph at different places."""
    out = model(batch["x"])
    chosen = int(batch["x"].sum() * 100) % 4
    return squared(out, batch["y"]) * (chosen % 2) + blocks(model)[chosen].aux


def output_loss(model: Any, batch: Batch) -> torch.Tensor:
    return squared(model(batch["x"]), batch["y"])


def gates(way: str, loss: Callable[[Any, Batch], torch.Tensor]) -> Case:
    def build() -> nn.Module:
        return {"field": Field, "lent": Lent}.get(way, lambda: Gates(way))()

    return Case(f"{way} {loss.__name__}", build, regression(DIM, DIM), loss)


CASES = {
    case.name: case
    for case in (
        gates("plain", auxiliary_loss),
        gates("frozen", auxiliary_loss),
        gates("checkpoint", auxiliary_loss),
        gates("frozen checkpoint", auxiliary_loss),
        gates("plain", auxiliary_by_rank),
        gates("plain", auxiliary_alone),
        gates("frozen", auxiliary_alone),
        gates("plain", caught_activation),
        gates("frozen", caught_activation),
        gates("plain", gradient_penalty),
        gates("frozen", gradient_penalty),
        gates("checkpoint", gradient_penalty),
        gates("plain", weight_penalty),
        gates("frozen", weight_penalty),
        gates("checkpoint", weight_gradient),
        gates("plain", weight_gradient),
        gates("lent", weight_gradient),
        gates("field", output_loss),
    )
}


QUICK = ("frozen checkpoint auxiliary_loss", "plain auxiliary_by_rank", "plain weight_penalty")


@pytest.mark.parametrize("name", [name if name in QUICK else thorough(name) for name in CASES])
@on_ranks(2)
def test_gradients_are_those_of_plain_torch(name: str) -> None:
    case, base = CASES[name], Setting(lr=0.05)
    expected = plain(case, base, 2, STEPS)
    first: Outcome | None = None
    for setting in (base.with_stage(0), base.with_stage(2), base.with_stage(3, cap=20, prefetch=False)):
        outcome = train(case, setting, STEPS)
        first = first or outcome
        assert len(set(of_all_ranks(outcome.parameters))) == 1
        assert_identical(first, outcome, f"{name}: {setting}")
        for gradients, wanted in zip(outcome.gradients, expected.gradients, strict=True):
            assert_close(gradients, wanted, 2e-6, f"{name}: {setting}")


class Mark:
    """Something to hang on a node, which dies with it."""


def marked(node: Any) -> weakref.ref[Mark]:
    mark = Mark()
    node.metadata["mark"] = mark
    return weakref.ref(mark)


@on_ranks(2)
def test_graphs_die_with_their_last_reference() -> None:
    """The graphs of a forward pass and of a differentiated backward pass."""
    case = CASES["plain gradient_penalty"]
    engine = start(case, Setting(stage=3))
    x = case.data(0, 0, dist.get_rank(), torch.float32)["x"].requires_grad_(True)
    gc.collect()
    gc.disable()
    try:
        out = engine(x)
        (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        marks = [marked(blocks(engine)[1].hidden.grad_fn), marked(out.grad_fn), marked(gradient.grad_fn)]
        for block in blocks(engine):
            del block.aux, block.hidden
        del out, gradient
        assert [mark() for mark in marks] == [None] * 3
    finally:
        gc.enable()
        engine.destroy()


@on_ranks(2)
def test_what_is_saved_may_not_be_changed_in_place() -> None:
    case = CASES["plain auxiliary_loss"]
    engine = start(case, Setting(stage=3))
    # The outcome of exp is what its backward needs.
    handle = blocks(engine)[1].inner.register_forward_hook(lambda module, args, out: out.exp().add_(1))
    loss = case.loss(engine, case.data(0, 0, 0, torch.float32))
    handle.remove()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        engine.backward(loss)


@on_ranks(2)
def test_reading_saved_weights_outside_of_a_backward_pass_names_the_unit() -> None:
    case = CASES["plain auxiliary_loss"]
    engine = start(case, Setting(stage=3))
    engine(case.data(0, 0, 0, torch.float32)["x"])
    node = blocks(engine)[1].hidden.grad_fn
    with pytest.raises(ReleasedParameterError, match=r"'blocks\.1' .*outside of a backward pass"):
        node._saved_mat2.sum()
