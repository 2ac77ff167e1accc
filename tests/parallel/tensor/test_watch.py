"""Blocks that differ by nothing but what they run, and blocks that are not called as modules: compared or refused."""

from __future__ import annotations

import re
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwise
from shardwise.errors import ConfigError
from shardwise.parallel.tensor.check import Comparison
from shardwise.parallel.tensor.guard import GradientGuard
from tests.harness import on_ranks, thorough
from tests.parallel.tensor.test_division import Refused, alone, config, differing, gradients

WIDTH = 8


class MLP(nn.Module):
    """Takes a softmax over its inner features if `soft` is true."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.soft: Any = 0

    def forward(self, x: torch.Tensor, soft: bool = False) -> torch.Tensor:
        y = F.silu(self.up_proj(x))
        chosen = self.soft(y) if callable(self.soft) else self.soft
        return self.down_proj(y.softmax(-1) if soft or chosen else y)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), MLP()

    def forward(self, x: torch.Tensor, soft: bool = False) -> torch.Tensor:
        return x + self.mlp(self.norm(x), soft)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


class Borrowing(Block):
    """Uses the MLP of another block by hand, or calls it."""

    def __init__(self, other: Block, by_hand: bool) -> None:
        super().__init__()
        self.other, self.by_hand = [other], by_hand

    def forward(self, x: torch.Tensor, soft: bool = False) -> torch.Tensor:
        (other,) = self.other
        return super().forward(x) + (by_hand(x, other) if self.by_hand else other.mlp(self.norm(x)))


def by_hand(x: torch.Tensor, block: Any) -> torch.Tensor:
    return F.linear(F.silu(F.linear(x, block.mlp.up_proj.weight)), block.mlp.down_proj.weight)


class Later(MLP):
    """Takes the softmax from the fourth call on."""

    calls = 0

    def forward(self, x: torch.Tensor, soft: bool = False) -> torch.Tensor:
        self.calls += 1
        return super().forward(x, self.calls > 3)


def _blocks(model: Any, x: torch.Tensor) -> torch.Tensor:
    for block in model.blocks:
        x = block(x)
    return x


def _with_argument(model: Any, x: torch.Tensor) -> torch.Tensor:
    for number, block in enumerate(model.blocks):
        x = block(x, number == 1)
    return x


def _again_with_argument(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model.blocks[0](model.blocks[0](x), True)


def _methods(model: Any, x: torch.Tensor) -> torch.Tensor:
    for block in model.blocks:
        x = block.run(x)
    return x


def _parts(model: Any, x: torch.Tensor) -> torch.Tensor:
    for block in model.blocks:
        x = x + block.mlp(block.norm(x))
    return x


def _between(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model.blocks[1](by_hand(model.blocks[0](x), model.blocks[0]))


def _layers(model: Any, x: torch.Tensor) -> torch.Tensor:
    for block in model.blocks:
        x = x + block.mlp.down_proj(F.silu(block.mlp.up_proj(x)).softmax(-1))
    return x


class Model(nn.Module):
    def __init__(self, body: Callable[[Any, torch.Tensor], torch.Tensor], penalty: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.body, self.penalty = body, penalty

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.body(self, x).square().mean()
        weight = self.blocks[0].mlp.up_proj.weight  # type: ignore[union-attr]
        return loss + self.penalty * weight.square().mean() if self.penalty else loss


def never(_: torch.Tensor) -> bool:
    return False


def always(_: torch.Tensor) -> bool:
    return True


def model(kind: str) -> Model:
    torch.manual_seed(0)
    name, _, soft = kind.partition(": ")
    bodies = {"argument": _with_argument, "again": _again_with_argument, "methods": _methods, "parts": _parts}
    made = Model(bodies.get(name, _layers if name == "layers" else _blocks), 1e-3 if name == "penalty" else 0.0)
    first, second = (block.mlp for block in made.blocks)
    if name == "number":
        second.soft = 1
    elif name == "fraction":
        first.soft, second.soft = 0.0, 0.5
    elif name == "function":
        first.soft, second.soft = never, always
    elif name.startswith("borrowed"):
        made.blocks[1] = Borrowing(made.blocks[0], name == "borrowed by hand")  # type: ignore[arg-type]
    elif soft:
        first.soft = second.soft = 1
    return made


def inputs() -> torch.Tensor:
    return torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(1))


REFUSED = {
    "number": "blocks.1 (Block), divided over 2 ranks, does not compute",
    "fraction": "blocks.1 (Block), divided over 2 ranks, does not compute",
    "function": "blocks.1 (Block), divided over 2 ranks, does not compute",
    "argument": "blocks.1 (Block), divided over 2 ranks, does not compute",
    "again": "blocks.0 (Block), divided over 2 ranks, does not compute",
    "methods: soft": "blocks.0.mlp (MLP), divided over 2 ranks, does not compute",
    "parts: soft": "blocks.0.mlp (MLP), divided over 2 ranks, does not compute",
    "layers": "the model calls blocks.0.mlp.up_proj (Linear) outside of the forward pass of blocks.0",
    "borrowed by hand": "blocks.1 (Borrowing) uses blocks.0.mlp.up_proj.weight of another block",
    "penalty": "the loss depends on blocks.0.mlp.up_proj.weight, of which each rank has a part",
}
RIGHT = ["plain", "methods", "parts", "borrowed"]


@on_ranks(2)
def test_each_block_is_compared_that_runs_something_else() -> None:
    """Nothing but a number, a function, an argument or the caller says that a block takes a softmax over features."""
    for kind in (*REFUSED, *RIGHT):
        told = gradients(model(kind), config(), inputs())
        assert isinstance(told, Refused) is (kind in REFUSED), (kind, told)
        if kind in REFUSED:
            assert told.startswith("ConfigError: tensor parallelism: ") and REFUSED[kind] in told, (kind, told)
        else:
            assert differing(*told, alone(model(kind), inputs())) == [], kind


class Evaluated(MLP):
    """Takes the softmax in evaluation only."""

    def forward(self, x: torch.Tensor, soft: bool = False) -> torch.Tensor:
        return super().forward(x, not self.training)


def started(kind: type[MLP]) -> Any:
    net = model("plain")
    for block in net.blocks:
        block.mlp = kind()  # type: ignore[assignment]
    return shardwise.initialize(model=net, config=config())[0]


WORDS = r"blocks\.0 \(Block\), divided over 2 ranks, does not compute what it computes whole"


@on_ranks(2)
def test_evaluation_behind_training_is_compared() -> None:
    engine = started(Evaluated)
    for _ in range(2):
        engine.backward(engine(inputs()))
        engine.step()
    hooks = [h for m in engine.module.modules() for h in m._forward_pre_hooks.values()]
    assert not any("BlockHook" in type(hook).__name__ for hook in hooks)  # from the second pass on
    engine.eval()
    with pytest.raises(ConfigError, match=WORDS), torch.no_grad():
        engine(inputs())


@on_ranks(2)
def test_a_block_of_many_is_compared_once() -> None:
    net = model("plain")
    net.blocks = nn.ModuleList(Block() for _ in range(6))
    with mock.patch.object(Comparison, "run", autospec=True, side_effect=Comparison.run) as run:
        gradients(net, config(), inputs())
    assert run.call_count == 1


@on_ranks(2)
def test_a_block_that_changes_after_some_steps_is_compared_again() -> None:
    engine = started(Later)
    with pytest.raises(ConfigError, match=WORDS):
        for _ in range(20):
            engine.backward(engine(inputs()))
            engine.step()
    assert engine.global_steps == 15


class OfTokens(Model):
    """Blocks with one norm for all, which is the last one, too; `tail`: an MLP before the last norm."""

    def __init__(self, tail: bool = False, kind: str = "plain") -> None:
        super().__init__(_between if kind == "between" else _blocks)
        self.norm = nn.LayerNorm(WIDTH)
        if kind == "borrowed":
            self.blocks[1] = Borrowing(self.blocks[0], by_hand=True)  # type: ignore[arg-type]
        for block in self.blocks:
            block.norm = self.norm  # type: ignore[union-attr]
        self.tail = MLP() if tail else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(self, x)
        x = x if self.tail is None else x + self.tail(x)
        return self.norm(x).square().mul(torch.arange(WIDTH)).mean()


def of_tokens(tail: bool) -> OfTokens:
    torch.manual_seed(0)
    return OfTokens(tail)


@on_ranks(2)
def test_norms_with_several_names_and_blocks_of_a_ranks_tokens() -> None:
    expected = alone(of_tokens(False), inputs())
    shared, tail = (gradients(of_tokens(tail), config(sequence_parallel=True), inputs()) for tail in (False, True))
    assert not isinstance(shared, Refused), shared
    assert differing(*shared, expected) == []
    assert isinstance(tail, Refused) and "tail (MLP), divided over 2 ranks" in tail, tail
    assert "its input 0 of shape [2, 2, 8] differs between the ranks" in tail, tail


@pytest.mark.parametrize("stage", [thorough(0), 3])
@on_ranks(2)
def test_a_divided_weight_used_by_hand_among_sharded_tokens_is_refused(stage: int) -> None:
    """All ranks have one loss, because each rank's wrong tokens are put together."""
    settings = config(sequence_parallel=True) | {"zero_optimization": {"stage": stage}}
    borrowed, between = (gradients(OfTokens(kind=kind), settings, inputs()) for kind in ("borrowed", "between"))
    assert "blocks.1 (Borrowing) uses blocks.0.mlp.up_proj.weight of another block" in borrowed, borrowed
    assert isinstance(between, Refused), between
    assert re.search(r"the loss depends on blocks\.0\.mlp\.(up|down)_proj\.weight, of which each rank", between)


def test_gradients_are_compared_after_an_overflow() -> None:
    def exchange(own: Any, _: str) -> Any:
        return [own, [*own[:2], *([2 * number for number in row] for row in own[2:])]]

    comm: Any = types.SimpleNamespace(imagined=False, device=torch.device("cpu"), exchange=exchange)
    model = nn.Linear(2, 1)
    guard = GradientGuard(model, types.SimpleNamespace(comm=comm, size=2))  # type: ignore[arg-type]
    (model(torch.ones(2)) * torch.inf).sum().backward()
    guard.check()
    model(torch.ones(2)).sum().backward()
    with pytest.raises(ConfigError, match="the gradient of weight, which all 2 ranks"):
        guard.check()
