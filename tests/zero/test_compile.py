"""Compiled models train as others do: what the engine does lies between the compiled regions."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.harness import on_ranks, thorough
from tests.harness.training import ADAMW, engine_of

DIM = 6
STEPS = 3
FORMS = ("module", "after", "engine", "blocks", "wrapped", "wrapped blocks", "wrapped engine", "step")

Backend = Callable[[Any, Any], Any]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 9), nn.Linear(9, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Tied(nn.Module):
    """Uses the embedding's weight outside of its module, and recomputes a block."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(7, DIM), nn.LayerNorm(DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if number == 1 else block(x)
        return F.cross_entropy(F.linear(self.norm(x), self.embedding.weight), tokens)


class Counting:
    """A backend that computes without a compiler and counts how often it has been asked."""

    def __init__(self) -> None:
        self.compiled = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.compiled += 1
        return graph.forward


def begin(form: str, backend: Backend, stage: int) -> tuple[Any, Callable[[torch.Tensor], torch.Tensor]]:
    """Return an engine and a training step, compiled in one of the ways that torch offers."""
    torch.manual_seed(0)
    model: Any = Tied()
    if form == "module":
        model.compile(backend=backend)
    if form == "blocks":
        for block in model.blocks:
            block.compile(backend=backend, fullgraph=True)
    if form == "wrapped blocks":
        model.blocks = nn.ModuleList(torch.compile(block, backend=backend) for block in model.blocks)
    if form == "wrapped":
        model = torch.compile(model, backend=backend)
    engine = engine_of(model, stage, ADAMW)
    if form == "engine":
        engine.compile(backend=backend)
    if form == "after":
        engine.module.compile(backend=backend)
    called = torch.compile(engine, backend=backend) if form == "wrapped engine" else engine

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = called(tokens)
        if form == "step":
            loss.backward()
        else:
            engine.backward(loss)
        engine.step()
        return loss

    return engine, torch.compile(step, backend=backend) if form == "step" else step


def losses_of(form: str, backend: Backend, stage: int) -> tuple[list[float], list[int]]:
    """Return the losses of some steps, and how many graphs had been compiled after each."""
    engine, step = begin(form, backend, stage)
    losses, compiled = [], []
    for number in range(STEPS):
        tokens = torch.arange(4) + number + dist.get_rank()
        losses.append(step(tokens % 7).item())
        compiled.append(getattr(backend, "compiled", 0))
    engine.destroy()
    torch._dynamo.reset()
    return losses, compiled


@pytest.mark.parametrize(
    ("stage", "forms"),
    [(3, ("engine", "wrapped blocks", "step")), thorough(0, ("blocks",)), thorough(3, FORMS)],
)
@on_ranks(2)
def test_every_way_to_compile_trains_as_if_it_were_not_compiled(stage: int, forms: tuple[str, ...]) -> None:
    expected, _ = losses_of("not compiled", Counting(), stage)
    for form in forms:
        losses, compiled = losses_of(form, Counting(), stage)
        assert losses == expected, form
        assert 0 < compiled[0] < 9, (form, compiled)
        assert compiled[-1] == compiled[0], (form, compiled)  # nothing that guards compare changes between steps


@pytest.mark.parametrize("stage", [thorough(0), 3])
def test_a_unit_of_a_compiled_engine_is_one_graph(stage: int) -> None:
    """No hook of the engine divides a block: its graph has a third of the operators of three blocks."""
    sizes: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        sizes.append(sum(node.op.startswith("call") for node in graph.graph.nodes))
        return graph.forward

    model, x = nn.Sequential(*(Block() for _ in range(3))), torch.randn(4, DIM)
    torch.compile(copy.deepcopy(model), backend=backend)(x)
    (whole,) = sizes
    torch._dynamo.reset()
    sizes.clear()
    engine = engine_of(model, stage, ADAMW)
    engine.compile(backend=backend)
    for _ in range(3):
        engine.backward(engine(x).square().sum())
        engine.step()
    assert len(engine.sharded.units) == 3
    # Blocks of one class may share a graph.
    assert set(sizes) == {whole // 3} and len(sizes) <= 3
    engine.destroy()
    torch._dynamo.reset()


@on_ranks(2)
def test_graphs_of_compiled_backward_passes() -> None:
    expected, losses = losses_of("not compiled", Counting(), 3)[0], losses_of("module", "aot_eager", 3)[0]
    assert losses == pytest.approx(expected, rel=1e-6)


@on_ranks(2)
def test_one_graph_over_several_units_is_refused() -> None:
    engine, step = begin("not compiled", Counting(), 3)
    engine.module.compile(backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="leave fullgraph=True out"):
        step(torch.arange(4))
    engine.module._compiled_call_impl = None
    assert step(torch.arange(4)).item() > 0
    torch._dynamo.reset()
