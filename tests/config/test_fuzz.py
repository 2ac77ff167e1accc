"""Large spaces: a mistyped key is never accepted, and no input makes the checker itself fail."""

from __future__ import annotations

import copy
import json
import string
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.config import load, resolve
from shardwise.config.jsonc import JSONSyntaxError, parse
from shardwise.config.schema_index import walk
from shardwise.errors import ConfigError
from tests.harness.tables import tables

VALID: dict[str, Any] = tables(__file__)["valid"]


def key_places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all keys of a nested value."""
    if isinstance(value, dict):
        inner = [place for name, item in value.items() for place in key_places(item, (*path, name))]
        return [(*path, name) for name in value] + inner
    if isinstance(value, list):
        return [place for index, item in enumerate(value) for place in key_places(item, (*path, index))]
    return []


@st.composite
def one_edit(draw: st.DrawFn) -> tuple[tuple[Any, ...], str]:
    """A key of `VALID` and the same key after one insertion, deletion, replacement or transposition."""
    place = draw(st.sampled_from(key_places(VALID)))
    name = place[-1]
    at = draw(st.integers(0, len(name) - 1))
    letter = draw(st.sampled_from(string.ascii_lowercase + string.digits + "_-"))
    edits = [name[:at] + name[at + 1 :], name[:at] + letter + name[at:], name[:at] + letter + name[at + 1 :]]
    edits += [name + letter, name[:at] + name[at : at + 2][::-1] + name[at + 2 :], name.upper()]
    return place, draw(st.sampled_from([edit for edit in edits if edit != name]))


def renamed(place: tuple[Any, ...], new: str) -> dict[str, Any]:
    result = copy.deepcopy(VALID)
    parent: Any = result
    for part in place[:-1]:
        parent = parent[part]
    parent[new] = parent.pop(place[-1])
    return result


def test_the_starting_point_is_valid() -> None:
    assert resolve(VALID).config.zero_optimization.stage == 3


@settings(max_examples=300)
@given(one_edit())
def test_a_key_with_one_typing_mistake_is_never_accepted(edit: tuple[tuple[Any, ...], str]) -> None:
    place, new = edit
    with pytest.raises(ConfigError) as caught:
        resolve(renamed(place, new))
    spelled = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in (*place[:-1], new)).lstrip(".")
    assert spelled in {problem.path for problem in caught.value.problems}


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 10),
    st.sampled_from([1e9, 1.5, float("inf"), float("nan"), "auto", "none", "cpu", "bf16", "x", ""]),
    st.lists(st.one_of(st.none(), st.integers(), st.text(max_size=2)), max_size=2),
    st.dictionaries(st.one_of(st.text(max_size=2), st.integers()), st.integers(), max_size=2),
)
PATHS = [path for path, _ in walk()]


@st.composite
def anything(draw: st.DrawFn) -> dict[str, Any]:
    """A configuration with values of any kind at known keys."""
    result: dict[str, Any] = {"train_batch_size": 8}
    kinds = st.sampled_from(["Adam", "SGD", "lamb", "Muon", "muon", "LBFGS", "x"])
    if draw(st.booleans()):
        names = st.sampled_from(["lr", "betas", "x", "momentum", "max_grad_norm"])
        result["optimizer"] = {"type": draw(kinds), "params": draw(st.dictionaries(names, VALUES, max_size=2))}
    if draw(st.booleans()):
        kinds = st.sampled_from(["WarmupLR", "WarmupDecayLR", "OneCycle", "StepLR", "LambdaLR", "x"])
        cycle = ["cycle_min_lr", "cycle_max_lr", "cycle_max_mom", "cycle_second_step_size", "decay_step_size"]
        warmup = ["warmup_num_steps", "total_num_steps", "warmup_max_lr", "warmup_type"]
        names = st.sampled_from([*warmup, *cycle, "step_size"])
        result["scheduler"] = {"type": draw(kinds), "params": draw(st.dictionaries(names, VALUES, max_size=3))}
    for path in draw(st.lists(st.sampled_from(PATHS), min_size=1, max_size=4)):
        place: Any = result
        for part, following in pairwise(path):
            if part == "[]":
                continue
            if not isinstance(place.get(part), dict):
                place[part] = {}
            if following == "[]":
                place[part] = [{}]
                place = place[part][0]
            else:
                place = place[part]
        place[path[-1]] = draw(VALUES)
    return result


@settings(max_examples=300)
@given(anything())
def test_every_input_is_accepted_or_refused_with_a_message(config: dict[str, Any]) -> None:
    before = repr(config)
    try:
        resolve(config)
    except ConfigError as error:
        assert error.problems and all(problem.message for problem in error.problems)
    assert repr(config) == before


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text(), json_values, max_size=4), st.sampled_from([None, 1]))
def test_reader_reads_all_json(value: dict[str, Any], indent: int | None) -> None:
    assert load(json.dumps(value, indent=indent)) == value
    assert load(json.dumps(value, ensure_ascii=False)) == value


@given(st.text(alphabet='{}[]",:/*#\n tfn012.e-+"a\\', max_size=40))
def test_reader_never_fails_in_another_way(text: str) -> None:
    try:
        value, _ = parse(text)
    except JSONSyntaxError as error:
        assert "line" in str(error)
        return
    json.dumps(value)
