"""Sums of squares: large runs are summed in pieces, small ones together."""

from __future__ import annotations

import math

import pytest
import torch

from shardwise.precision.norms import CHUNK, Runs, combine

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_runs_of_all_sizes_add_up_by_parameter(dtype: torch.dtype) -> None:
    sizes = [(0, 3), (1, CHUNK), (2, CHUNK + 1), (1, 2 * CHUNK + 5), (3, 0), (5, 1), (0, 4 * CHUNK)]
    runs = [(index, torch.randn(size).to(dtype)) for index, size in sizes]
    expected = [0.0] * 6
    for index, run in runs:
        expected[index] += float(run.double().square().sum())
    found = Runs(runs, 6, CPU).sums_of_squares()
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx(expected, rel=1e-12)
    assert found[3] == found[4] == 0
    assert float(combine(found, 0.5)) == pytest.approx(0.5 * math.sqrt(sum(expected)), rel=1e-12)


@pytest.mark.parametrize("size", [5, CHUNK + 5])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_one_bad_element_shows(size: int, bad: float) -> None:
    run = torch.ones(size)
    run[size - 1] = bad
    assert not math.isfinite(float(combine(Runs([(0, run)], 1, CPU).sums_of_squares(), 1.0)))


def test_values_are_read_anew_and_nothing_may_be_there() -> None:
    run = torch.ones(4)
    runs = Runs([(0, run)], 1, CPU)
    run.mul_(2)
    assert runs.sums_of_squares().tolist() == [16.0]
    assert Runs([], 2, CPU).sums_of_squares().tolist() == [0.0, 0.0]
    assert combine(torch.zeros(0, dtype=torch.float64), 1.0) == 0
