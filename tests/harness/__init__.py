"""Runs a function on several Gloo ranks in long-lived worker processes (see `tests.harness.pool`); marks cases."""

import functools

import pytest

from tests.harness.pool import RankFailure, RankTimeout, close_pool, of_all_ranks, on_ranks, run_ranks

thorough = functools.partial(pytest.param, marks=pytest.mark.thorough)
"""A case of `parametrize` that `make exhaustive` runs and `make test` leaves out."""

__all__ = [
    "RankFailure",
    "RankTimeout",
    "close_pool",
    "of_all_ranks",
    "on_ranks",
    "run_ranks",
    "thorough",
]
