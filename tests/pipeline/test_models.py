"""Families of models: every parameter's gradient, and parameters after 5 steps, equal those of one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.harness import run_ranks, thorough
from tests.pipeline.families import TIED, Case, Trained, alone, check, train_all

SCHEDULES = ("naive", "gpipe", "1f1b", "zb-h1", "interleaved", "zbv", "v-half", "v-min", "dualpipe-v")
SEVERAL = ("interleaved", "zbv", "v-half", "v-min", "dualpipe-v")
"""Schedules with several stages on a rank."""


def compare(cases: list[Case], ranks: int) -> list[list[Trained]]:
    """Train cases, compare each with one process, and return the results by case and rank."""
    first = cases[0]
    places = ranks // first.stages // first.tensor
    expected = alone(first.family, first.micro_batches, places, first.steps)
    by_case = [list(found) for found in zip(*run_ranks(train_all, ranks, cases), strict=True)]
    for case, found in zip(cases, by_case, strict=True):
        assert {name for run in found for name in run.gradients} == set(expected.gradients)
        for rank, run in enumerate(found):
            check(run, expected, f"{case}, rank {rank}", buffers=places == 1)
    return by_case


def bit_equal(one: list[Trained], other: list[Trained], without: str, where: str) -> None:
    """Compare the gradients of two runs bit by bit; ranks may have other stages."""
    known = {name: values for run in one for name, values in run.gradients.items()}
    for run in other:
        for name, values in run.gradients.items():
            assert name == without or torch.equal(values, known[name]), f"{where}: {name}"


@pytest.mark.parametrize(
    ("family", "stages", "micro_batches"),
    [thorough("t5", 3, 2), thorough("gpt2", 4, 8), thorough("llama", 2, 1), thorough("bloom", 3, 8)],
)
def test_every_schedule_gives_every_gradient(family: str, stages: int, micro_batches: int) -> None:
    """Where copies of a tied weight are on one rank, their gradients are added in another order."""
    case = Case(family, stages, micro_batches=micro_batches)
    (first,) = compare([case], stages)
    cases = [replace(case, schedule=name, steps=1) for name in SCHEDULES if name != case.schedule]
    for other, found in zip(cases, compare(cases, stages), strict=True):
        one_rank = TIED.get(family, "") if other.schedule in SEVERAL else ""
        bit_equal(first, found, one_rank, f"{other}")


@pytest.mark.parametrize(
    ("case", "ranks"),
    [
        (Case("t5", 3, steps=2), 3),
        (Case("gpt2", 2, "zb-h1", 2, steps=2), 4),
        (Case("llama", 2, tensor=2, steps=2), 4),
        thorough(Case("llama", 2, "zbv", zero=3), 4),
        thorough(Case("t5", 4, zero=1), 8),
        thorough(Case("bloom", 2, zero=1, tensor=2), 8),
        thorough(Case("llama", 2, "zb-h1", zero=3, tensor=2), 8),
    ],
    ids=str,
)
def test_layouts_give_every_gradient(case: Case, ranks: int) -> None:
    compare([case], ranks)
