"""A mesh of one rank: everything that ranks do is done, with oneself."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from shardwise.memory import Category
from shardwise.zero.units.plan import Plan
from tests.harness import run_ranks, thorough
from tests.harness.training import Setting, assert_identical, gradients, start, train_all
from tests.models import CASES


@contextmanager
def forced() -> Iterator[None]:
    """Have engines divide state over one rank."""
    with mock.patch.object(Plan, "of", functools.partial(Plan.of, forced=True)):
        yield


def both_ways(name: str, settings: list[Setting]) -> Any:
    plain = train_all(name, settings)
    with forced():
        return plain, train_all(name, settings)


@pytest.mark.parametrize(
    ("accumulation", "precision"), [thorough(1, "fp32"), thorough(2, "fp32"), (2, "bf16"), thorough(1, "fp16")]
)
def test_one_rank_that_divides_has_the_bits_of_one_that_does_not(precision: str, accumulation: int) -> None:
    settings = [
        Setting(stage, accumulation=accumulation, precision=precision, clip=1.0, optimizer="AdamW", lr=1e-2)
        for stage in (0, 1, 2, 3)
    ]
    ((plain, divided),) = run_ranks(both_ways, 1, "gpt", settings)
    for setting, first, second in zip(settings, plain, divided, strict=True):
        assert_identical(first, second, f"{setting}")
        assert_identical(plain[0], first, f"{setting}")


@pytest.mark.parametrize("name", [*map(thorough, ["odd_mlp", "borrower", "router", "mixed_types"]), "lora"])
def test_models_that_are_not_regular(name: str) -> None:
    settings = [Setting(stage, accumulation=2, optimizer="momentum", clip=0.5) for stage in (0, 2, 3)]
    ((plain, divided),) = run_ranks(both_ways, 1, name, settings)
    for setting, first, second in zip(settings, plain, divided, strict=True):
        assert_identical(first, second, f"{setting}")


def released() -> list[bool]:
    """Between passes nothing is gathered, and gradients are where they are stepped."""
    with forced():
        engine = start(CASES["gpt"], Setting(3))
    seen = [unit.sharded for unit in engine.sharded.units]
    for step in range(2):
        engine.backward(CASES["gpt"].loss(engine, CASES["gpt"].data(step, 0, 0, torch.float32)))
        seen += [not section.full.numel() for unit in engine.sharded.units for section in unit.sections]
        assert gradients(engine.module)
        engine.step()
    engine.destroy()
    return seen


def test_it_gathers_and_releases() -> None:
    ((*seen,),) = run_ranks(released, 1)
    assert len(seen) > 10 and all(seen)


def taken(stage: int) -> tuple[int, int, int]:
    """Most bytes of gradients and of buffers in the passes of a step, and bytes of all gradients."""
    with forced():
        engine = start(CASES["gpt"], Setting(stage))
    engine.backward(CASES["gpt"].loss(engine, CASES["gpt"].data(0, 0, 0, torch.float32)))
    peak = engine.accountant.peak
    held = sum(section.layout.numel * 4 for unit in engine.sharded.units for section in unit.trainable)
    engine.destroy()
    return peak[Category.GRADIENTS], peak[Category.BUFFERS], held


@pytest.mark.parametrize("stage", [thorough(1), 2])
def test_gradients_are_collected_where_they_stay(stage: int) -> None:
    ((gradients, buffers, held),) = run_ranks(taken, 1, stage)
    assert gradients == held and not buffers
