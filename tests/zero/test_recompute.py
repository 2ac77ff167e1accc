"""Activation checkpointing inside every stage gives the bits of training without it, with dropout too."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.harness import of_all_ranks, on_ranks, thorough
from tests.harness.training import SGD, Setting, assert_identical, bits, each, engine_of, start, train
from tests.models import GPT, Case, language, language_loss

Runner = Callable[[nn.Module, torch.Tensor], torch.Tensor]

RUNNERS: dict[str, Runner] = {
    "none": lambda block, x: block(x),
    "reentrant": partial(checkpoint, use_reentrant=True),  # type: ignore[dict-item]
    "other": partial(checkpoint, use_reentrant=False),  # type: ignore[dict-item]
    "half": lambda block, x: half_recomputed(block, x),
}


def half_recomputed(block: Any, x: torch.Tensor) -> torch.Tensor:
    """Recompute the feed-forward half of a block only, so that a unit is entered twice in a pass."""
    x = x + block.drop(block.attention(block.norm1(x)))
    half = checkpoint(lambda h: block.down(F.gelu(block.up(block.norm2(h)))), x, use_reentrant=False)
    return x + block.drop(half)


def build(runner: str, dropout: float, frozen: bool) -> nn.Module:
    model = GPT(layers=3, head="tied", dropout=dropout)
    model.run = RUNNERS[runner]
    if frozen:
        model.blocks[0].requires_grad_(False)
        model.blocks[2].attention.requires_grad_(False)
    return model


@on_ranks(2)
def test_evaluation_in_inference_mode_before_the_backward_pass() -> None:
    case = Case("other", partial(build, "other", 0.0, False), language, language_loss)
    engine = start(case, Setting(stage=3, cap=50))
    batch = case.data(0, 0, dist.get_rank(), torch.float32)
    for _ in range(3):
        loss = case.loss(engine, batch)
        with torch.inference_mode():
            case.loss(engine, batch)
        engine.backward(loss)
        engine.step()
    assert len(set(of_all_ranks(bits(engine)))) == 1


@pytest.mark.parametrize(
    ("runners", "setting", "dropout", "frozen"),
    [
        (("reentrant", "half"), Setting(stage=3, cap=50), 0.2, True),
        (("other",), Setting(stage=3, accumulation=2), 0.2, True),
        *(
            thorough(tuple(RUNNERS), setting, 0.2 * frozen, frozen)
            for setting in (Setting(), Setting(stage=3, cap=50), Setting(stage=3, accumulation=2))
            for frozen in (False, True)
        ),
    ],
)
@on_ranks(2)
def test_recomputation_changes_no_bit(runners: Iterable[str], setting: Setting, dropout: float, frozen: bool) -> None:
    whole = setting if setting.accumulation > 1 else Setting()
    expected = None
    for runner, one in (("none", whole), *((runner, setting) for runner in runners)):
        case = Case(runner, partial(build, runner, dropout, frozen), language, language_loss)
        # `train` seeds before it builds, so that every run draws the same dropout masks.
        outcome = train(case, one, steps=2)
        assert len(set(of_all_ranks(outcome.parameters))) == 1
        expected = expected or outcome
        assert_identical(expected, outcome, runner)


def several_passes(runner: str, stage: int, retained: bool) -> str:
    """Two forward passes before two backward passes, or two backward passes of one graph."""
    model = Case("", partial(build, runner, 0.0, False), language, language_loss)
    engine = start(model, Setting(stage=stage, accumulation=2, cap=300))
    for step in range(2):
        losses = [model.loss(engine, model.data(step, m, dist.get_rank(), torch.float32)) for m in range(2 - retained)]
        engine.set_gradient_accumulation_boundary(True)
        for number, loss in enumerate(losses * (1 + retained)):
            engine.backward(loss, retain_graph=retained and number == 0)
        engine.step()
    return bits(engine)


@pytest.mark.parametrize("retained", [False, True])
@pytest.mark.parametrize("stage", [thorough(0), 1, 3])
@on_ranks(2)
def test_reentrant_graphs_may_wait_for_each_other_and_be_differentiated_again(stage: int, retained: bool) -> None:
    other, reentrant = each(several_passes, [(runner, stage, retained) for runner in ("other", "reentrant")])
    assert other == reentrant


class Repeated(nn.Module):
    """A layer that is called three times; all of its gradients come from passes nested in the backward pass."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant, self.layer = reentrant, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = checkpoint(self.layer, x, use_reentrant=self.reentrant)
        return x.square().mean()


def differentiated_twice(reentrant: bool, stage: int) -> str:
    torch.manual_seed(0)
    engine = engine_of(Repeated(reentrant), stage, SGD, gradient_accumulation_steps=2)
    engine.set_gradient_accumulation_boundary(True)
    loss = engine(torch.ones(2, 4, requires_grad=True) + dist.get_rank())
    for number in range(2):
        engine.backward(loss, retain_graph=not number)
    engine.step()
    return bits(engine)


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_reentrant_calls_of_one_layer_differentiated_twice(stage: int) -> None:
    found = each(differentiated_twice, [(False, stage), (True, stage)])
    assert found[0] == found[1]
