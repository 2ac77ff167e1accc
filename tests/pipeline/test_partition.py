"""Partitions are optimal (against brute force), even in ties, and errors name numbers that would do."""

from __future__ import annotations

import time
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import ConfigError
from shardwise.pipeline.partition import LayerCost, balance, partition


def every_partition(count: int, parts: int) -> list[list[int]]:
    return [[0, *inner, count] for inner in combinations(range(1, count), parts - 1)]


def sizes(weights: list[float], bounds: list[int]) -> list[float]:
    return [sum(weights[low:high]) for low, high in pairwise(bounds)]


def rank_of(weights: list[float], bounds: list[int]) -> tuple[float, float, int]:
    parts = sizes(weights, bounds)
    return max(parts), sum(size * size for size in parts), sum((b - a) ** 2 for a, b in pairwise(bounds))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=9), st.data())
def test_the_largest_part_is_as_small_as_possible_and_ties_are_even(weights: list[int], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(weights)))
    found = balance(weights, parts)
    assert found in every_partition(len(weights), parts)
    assert rank_of(weights, found) == min(rank_of(weights, bounds) for bounds in every_partition(len(weights), parts))


def test_a_thousand_layers_take_no_time() -> None:
    start = time.process_time()
    bounds = balance([1 + number % 7 for number in range(1000)], 256)
    assert len(bounds) == 257
    assert time.process_time() - start < 20


LAYERS = [LayerCost("Embedding", 100), *[LayerCost("Block", 10)] * 4, LayerCost("Norm", 1), LayerCost("Head", 100)]


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("uniform", [0, 3, 7]),
        ("parameters", [0, 3, 7]),
        ("best", [0, 3, 7]),
        ("type:block", [0, 3, 7]),
        ("type:^(head|norm)$", [0, 6, 7]),
        ([0, 1, 7], [0, 1, 7]),
    ],
)
def test_methods(method: str | list[int], expected: list[int]) -> None:
    assert partition(method, 2, LAYERS) == expected


def test_measured_times_are_the_best_weights() -> None:
    layers = [LayerCost("Block", 1, seconds=seconds) for seconds in (4.0, 1.0, 1.0, 1.0, 1.0)]
    assert partition("best", 2, layers) == partition("profile", 2, layers) == [0, 1, 5]
    assert partition("parameters", 2, layers) in ([0, 2, 5], [0, 3, 5])


@pytest.mark.parametrize(
    ("method", "stages", "message"),
    [
        ("uniform", 8, "7 layers cannot be divided into 8 pipeline stages.*Use 1 to 7 stages"),
        ("uniform", 0, "Use 1 to 7 stages"),
        ("type:decoder", 2, "no layer's class name matches. The classes are Block, Embedding, Head, Norm"),
        ("type:(", 2, "the regular expression is invalid"),
        ("parameter", 2, "found 'parameter'. Did you mean 'parameters'?"),
        ("profile", 2, "no layer times are given"),
        ([0, 3, 3, 7], 3, r"expected 4 ascending boundaries from 0 to 7.*found \[0, 3, 3, 7\]"),
        ([0, 7], 2, "expected 3 ascending boundaries"),
        ([1, 2, 7], 2, "ascending boundaries from 0 to 7"),
    ],
)
def test_refused(method: str | list[int], stages: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        partition(method, stages, LAYERS)


def test_weights_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match="finite numbers that are not negative"):
        balance([1.0, float("nan")], 1)
