from __future__ import annotations

import argparse
import collections
import enum
import json
import math
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.checkpoint.codec import decode, encode
from shardwise.errors import CheckpointError


def through_json(value: Any) -> Any:
    aside: list[torch.Tensor] = []

    def put_aside(path: str, tensor: torch.Tensor) -> int:
        aside.append(tensor.clone())
        return len(aside) - 1

    text = json.dumps(encode(value, "state", put_aside), allow_nan=False)
    return decode(json.loads(text), aside.__getitem__)


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, numpy.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    if isinstance(one, numpy.generic):
        return one.dtype == other.dtype and one == other
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, float) and math.isnan(one):
        return math.isnan(other)
    return bool(one == other)


numbers = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=9)
keys = st.text() | st.integers() | st.booleans() | st.none() | st.tuples(st.integers(), st.text())
values = st.recursive(
    numbers,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(st.text() | st.just("$tensor"), inner, max_size=4).map(collections.OrderedDict)
    ),
    max_leaves=15,
)


@given(values)
def test_plain_values_come_back_equal_and_of_the_same_types(value: Any) -> None:
    assert same(through_json(value), value)


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(6).view(2, 3),
        torch.tensor(2.5, dtype=torch.bfloat16),
        torch.tensor(float("-inf")),
        torch.zeros(0, 3),
        torch.tensor([True, False]),
        numpy.arange(4, dtype=numpy.uint32),
        numpy.float32(0.1),
        numpy.int64(-3),
        collections.Counter({3: 2, 5: 1}),
        {"a": [torch.ones(2), ({"b": numpy.ones((2, 2))},)]},
        {"$tuple": [1]},
    ],
    ids=repr,
)
def test_tensors_arrays_and_collections_come_back(value: Any) -> None:
    assert same(through_json(value), value)


class Colour(enum.IntEnum):
    RED = 1


class Special(dict):  # type: ignore[type-arg]
    pass


def recursive() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"args": argparse.Namespace(x=1)}, r"state\['args'\]: argparse.Namespace cannot be saved"),
        ({"a": [1, {"b": print}]}, r"state\['a'\]\[1\]\['b'\]: builtins.builtin_function_or_method"),
        ({"a": {1, 2}}, r"state\['a'\]: builtins.set"),
        ({"a": Colour.RED}, r"state\['a'\]: .*Colour"),
        ({"a": Special()}, r"state\['a'\]: .*Special"),
        ({"a": 1j}, r"state\['a'\]: builtins.complex"),
        ({frozenset(): 1}, "state: a key of type frozenset"),
        ({"a": torch.zeros(2, device="meta")}, r"state\['a'\]: a sparse, quantized or meta tensor"),
        ({"a": torch.eye(2).to_sparse()}, r"state\['a'\]: a sparse, quantized or meta tensor"),
        ({"a": numpy.array([object()])}, r"state\['a'\]: a numpy array of dtype object"),
        (recursive(), "does it contain itself"),
    ],
)
def test_what_cannot_be_saved_is_refused_by_its_path(value: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        encode(value, "state", lambda path, tensor: path)


@pytest.mark.parametrize(
    "tree",
    [
        {"$code": "1"},
        {"$float": "x"},
        {"$scalar": ["float32"]},
        {"$bytes": "@"},
        {"$tuple": 3},
        {"$dict": [[{"$dict": []}, 1]]},
    ],
)
def test_foreign_trees_are_refused(tree: Any) -> None:
    with pytest.raises(CheckpointError, match="not as written"):
        decode(tree, lambda reference: torch.zeros(1))


def test_a_parameter_comes_back_as_its_values() -> None:
    back = through_json({"w": torch.nn.Parameter(torch.ones(2))})
    assert same(back, {"w": torch.ones(2)})


def test_the_default_device_has_no_say() -> None:
    tree = encode(torch.tensor(2.5), "x", lambda path, tensor: path)
    with torch.device("meta"):
        assert decode(tree, torch.tensor).item() == 2.5
