"""Families of models: every parameter's gradient, and parameters after 5 steps, equal those of one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.harness import run_ranks, thorough
from tests.pipeline.families import FAMILIES, Case, Trained, alone, check, train_all

SCHEDULES = ("naive", "gpipe", "1f1b", "zb-h1", "interleaved", "zbv", "v-half", "v-min", "dualpipe-v")
SEVERAL = ("interleaved", "zbv", "v-half", "v-min", "dualpipe-v")
"""Schedules with several stages on a rank."""


def compare(cases: list[Case], ranks: int) -> list[list[Trained]]:
    """Train cases, compare each with one process, and return the results by case and rank."""
    first = cases[0]
    places = ranks // first.stages // first.tensor
    expected = alone(FAMILIES[first.family], first.micro_batches, places, first.steps)
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
    [
        ("t5", 3, 2),
        *(
            thorough(family, stages, micro_batches)
            for family in FAMILIES
            for stages in (2, 3, 4)
            for micro_batches in (1, 2, 8)
            if (family, stages, micro_batches) != ("t5", 3, 2)
        ),
    ],
)
def test_every_schedule_gives_every_gradient(family: str, stages: int, micro_batches: int) -> None:
    """Where copies of a tied weight are on one rank, their gradients are added in another order."""
    case = Case(family, stages, micro_batches=micro_batches)
    (first,) = compare([case], stages)
    cases = [replace(case, schedule=name, steps=1) for name in SCHEDULES if name != case.schedule]
    for other, found in zip(cases, compare(cases, stages), strict=True):
        one_rank = FAMILIES[family].tied if other.schedule in SEVERAL else ""
        bit_equal(first, found, one_rank, f"{other}")


LAYOUTS: dict[str, tuple[Any, int]] = {
    "pp2 dp2": (Case("", 2), 4),
    "pp4 dp2": (Case("", 4), 8),
    "pp2 tp2": (Case("", 2, tensor=2), 4),
    "pp2 tp2 dp2": (Case("", 2, tensor=2), 8),
    "pp2 ep2": (Case("experts", 2, expert=2), 4),
    "pp2 ep2 dp2": (Case("experts", 2, expert=2), 8),
    "pp4 ep2": (Case("experts", 4, expert=2), 8),
}


def layouts() -> list[Any]:
    defaults = [("pp2 tp2 dp2", "hf-llama", 1)]
    found: list[Any] = list(defaults)
    for layout, (case, _) in LAYOUTS.items():
        families = [case.family] if case.family else [n for n in FAMILIES if case.tensor == 1 or n.startswith("hf")]
        families = [family for family in families if family != "experts" or case.expert > 1]
        found += [thorough(layout, f, zero) for f in families for zero in range(4) if (layout, f, zero) not in defaults]
    return found


@pytest.mark.parametrize(("layout", "family", "zero"), layouts())
def test_layouts_give_every_gradient(layout: str, family: str, zero: int) -> None:
    case, ranks = LAYOUTS[layout]
    case = replace(case, family=family, zero=zero)
    schedules = ("1f1b", "zb-h1", "zbv") if case.tensor == 1 else ("1f1b", "zb-h1")
    compare([replace(case, schedule=name) for name in schedules], ranks)
