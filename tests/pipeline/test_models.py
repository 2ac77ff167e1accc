"""Families of models: every parameter's gradient, and parameters after 5 steps, equal those of one process."""

from __future__ import annotations

import pytest

from tests.harness import run_ranks, thorough
from tests.pipeline.families import Case, alone, check, train


@pytest.mark.parametrize(
    ("case", "ranks"),
    [
        (Case("t5", 3, steps=2), 3),
        thorough(Case("gpt2", 2, "zb-h1", 2, steps=2), 4),
        (Case("llama", 2, tensor=2, steps=2), 4),
        thorough(Case("llama", 2, "zbv", zero=3), 4),
        thorough(Case("t5", 4, zero=1), 8),
        thorough(Case("bloom", 2, zero=1, tensor=2), 8),
        thorough(Case("llama", 2, "zb-h1", zero=3, tensor=2), 8),
    ],
    ids=str,
)
def test_layouts_give_every_gradient(case: Case, ranks: int) -> None:
    places = ranks // case.stages // case.tensor
    expected = alone(case.family, case.micro_batches, places, case.steps)
    runs = run_ranks(train, ranks, case)
    assert {name for run in runs for name in run.gradients} == set(expected.gradients)
    for rank, run in enumerate(runs):
        check(run, expected, f"{case}, rank {rank}", buffers=places == 1)
