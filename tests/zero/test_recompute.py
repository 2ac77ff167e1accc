"""Activation checkpointing inside every stage gives the bits of training without it, with dropout too."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.harness import run_ranks, thorough
from tests.harness.training import Outcome, Setting, assert_identical, train
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


def train_runners(settings: list[Setting], dropout: float, frozen: bool) -> list[list[Outcome]]:
    """Outcomes by runner, then setting."""
    outcomes = []
    for runner in RUNNERS:
        case = Case(runner, partial(build, runner, dropout, frozen), language, language_loss)
        # `train` seeds before it builds, so that every run draws the same dropout masks.
        outcomes.append([train(case, setting, steps=2) for setting in settings])
    return outcomes


@pytest.mark.parametrize(("dropout", "frozen"), [thorough(0.0, False), (0.2, True)])
def test_recomputation_changes_no_bit(dropout: float, frozen: bool) -> None:
    settings = [Setting(stage=stage, cap=cap) for stage, cap in ((0, None), (2, 50), (3, 50))]
    settings += [Setting(stage=3, accumulation=2)]
    first, second = run_ranks(train_runners, 2, settings, dropout, frozen)
    rows = first
    for mine, theirs in zip(first, second, strict=True):
        for left, right in zip(mine, theirs, strict=True):
            assert left.parameters == right.parameters
    for row, runner in zip(rows, RUNNERS, strict=True):
        for setting, outcome, reference in zip(settings, row, rows[0], strict=True):
            assert_identical(reference, outcome, f"{runner} {setting}")
        for setting, outcome in zip(settings[:3], row[:3], strict=True):
            assert_identical(row[0], outcome, f"{runner}: {setting}")
