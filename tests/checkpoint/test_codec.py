from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import json
import math
import pathlib
import sys
import types
import uuid
import zoneinfo
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.checkpoint import register_type
from shardwise.checkpoint.nested_json import decode, encode
from shardwise.errors import CheckpointError, UsageError


def through_json(value: Any) -> Any:
    aside: list[torch.Tensor] = []

    def store_tensor(path: str, tensor: torch.Tensor) -> int:
        aside.append(tensor.clone())
        return len(aside) - 1

    text = json.dumps(encode(value, "state", store_tensor), allow_nan=False)
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
def test_any_plain_value_comes_back(value: Any) -> None:
    assert same(through_json(value), value)


class Colour(enum.IntEnum):
    RED = 1


class Access(enum.Flag):
    READ = 1
    WRITE = 2


@dataclasses.dataclass
class Pair:
    left: Any
    right: Any = 2
    hidden: list[int] = dataclasses.field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        MADE.append(self)


@dataclasses.dataclass(frozen=True)
class Slots:
    __slots__ = ("x",)
    x: int


@dataclasses.dataclass
class Armed:
    x: int = 0

    def __del__(self) -> None:
        MADE.append(self)


MADE: list[Any] = []
PLAIN: list[Any] = [
    torch.arange(6).view(2, 3),
    torch.tensor(2.5, dtype=torch.bfloat16),
    torch.zeros(0, 3),
    torch.tensor([True, False]),
    numpy.arange(4, dtype=numpy.uint32),
    numpy.float32(0.1),
    collections.Counter({3: 2, 5: 1}),
    {"$tuple": [1], "a": [torch.ones(2), ({"b": numpy.ones((2, 2))},)]},
    argparse.Namespace(lr=1e-3, betas=(0.9, 0.99), nested=argparse.Namespace(a=[1])),
    types.SimpleNamespace(a=1),
    collections.defaultdict(list, {"a": [1]}),
    collections.defaultdict(None, {1: 2}),
    collections.deque([1, 2, 3], maxlen=3),
    {1, "a", (2, 3)},
    frozenset({1.5}),
    complex(float("inf"), -0.5),
    bytearray(b"ab"),
    range(1, 9, 2),
    slice(None, 3),
    datetime.datetime(2026, 10, 25, 2, 30, 1, 7, fold=1, tzinfo=zoneinfo.ZoneInfo("Europe/Vienna")),
    datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc),
    datetime.date(2026, 1, 2),
    datetime.time(1, 2, tzinfo=datetime.timezone(datetime.timedelta(hours=5), "east")),
    datetime.timedelta(days=-1, microseconds=5),
    pathlib.Path("a/b"),
    pathlib.PureWindowsPath("c:/a"),
    decimal.Decimal("1.10"),
    fractions.Fraction(1, 3),
    uuid.UUID(int=7),
    torch.Size([2, 3]),
    torch.bfloat16,
    torch.device("cuda", 1),
    numpy.complex128(1j),
    numpy.datetime64("2026-01-02"),
    numpy.str_("text"),
    numpy.longdouble("0.1"),
    numpy.dtype("float32"),
    numpy.array(["a", "bcd"]),
    numpy.array([["2026-01-02"]], dtype="datetime64[D]"),
    Colour.RED,
    Access.READ | Access.WRITE,
    {Colour.RED: 1, pathlib.Path("a"): 2, b"k": 3},
    Slots(3),
]


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: type(value).__name__)
def test_values_come_back_equal_and_of_the_same_types(value: Any) -> None:
    back = through_json({"a": [value]})["a"][0]
    assert same(back, value)
    assert getattr(back, "maxlen", None) == getattr(value, "maxlen", None)
    assert getattr(back, "default_factory", None) is getattr(value, "default_factory", None)
    assert getattr(back, "fold", 0) == getattr(value, "fold", 0)


def test_dataclasses_come_back_without_code_of_theirs() -> None:
    pair = Pair(torch.ones(2), {"x": Colour.RED})
    pair.hidden.append(3)
    MADE.clear()
    back = through_json(pair)
    assert type(back) is Pair and back.hidden == [3] and back.right == {"x": Colour.RED} and MADE == []
    assert torch.equal(back.left, torch.ones(2))
    with pytest.raises(CheckpointError, match="does something when it is deleted"):
        through_json(Armed())


@pytest.mark.parametrize(
    "tree",
    [
        {"$dataclass": ["os", "path", {}]},
        {"$dataclass": ["this", "s", {}]},
        {"$dataclass": ["subprocess", "Popen", {"args": "true"}]},
        {"$enum": ["builtins", "eval", "1"]},
        {"$enum": [__name__, "Colour", "__class__"]},
        {"$registered": ["os.system", "true"]},
        {"$numpy_raw": ["O", [1], ""]},
        {"$numpy_raw": ["<f8", [1 << 60], "AAAA"]},
        {"$set": [[]]},
        {"$set": [{"$dataclass": [__name__, "Slots", {"x": 1}]}]},
        {"$dict": [[{"$dataclass": [__name__, "Slots", {"x": 1}]}, 1]]},
        {"$zone": "../../../../etc/passwd"},
        {"$path": ["Popen", "a"]},
        {"$dtype": "load"},
        {"$defaultdict": ["eval", {}]},
        {"$code": "1"},
        {"$float": "x"},
        {"$scalar": ["float32"]},
        {"$bytes": "@"},
        {"$tuple": 3},
    ],
    ids=str,
)
def test_nothing_that_a_file_names_is_imported_or_called(tree: Any) -> None:
    with pytest.raises(CheckpointError):
        decode(tree, lambda reference: torch.zeros(1))
    assert "this" not in sys.modules


class Meter:
    def __init__(self, total: float, parts: Any) -> None:
        self.total, self.parts = total, parts


class Counting:
    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_registered_classes_come_back_and_objects_with_a_state_give_that() -> None:
    with pytest.raises(CheckpointError, match=r"state\['m'\]: .*Meter cannot be saved"):
        through_json({"m": Meter(1.0, None)})
    register_type(Meter, lambda meter: {"total": meter.total, "parts": meter.parts}, lambda plain: Meter(**plain))
    back = through_json({"m": [Meter(1.0, {"inner": Meter(2.0, torch.ones(1))})]})["m"][0]
    assert type(back) is Meter and type(back.parts["inner"]) is Meter and back.parts["inner"].total == 2.0
    with pytest.raises(UsageError, match=r"that of .*Meter"):
        register_type(Counting, vars, lambda plain: Counting(), name=f"{__name__}.Meter")
    with pytest.raises(UsageError, match="as it is"):
        register_type(dict, dict, dict)
    with pytest.raises(
        CheckpointError, match=r"'other.Class', which is not registered here; call shardwise.checkpoint"
    ):
        decode({"$registered": ["other.Class", 1]}, lambda reference: torch.zeros(1))
    counting = Counting()
    counting.count = 4
    assert through_json({"sampler": counting}) == {"sampler": {"count": 4}}


class Special(dict):  # type: ignore[type-arg]
    pass


def recursive() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"args": argparse.Namespace(x=print)}, r"state\['args'\]\['x'\]: builtins.builtin_function_or_method cannot"),
        ({"a": [1, {"b": print}]}, r"state\['a'\]\[1\]\['b'\]: builtins.builtin_function_or_method"),
        ({"a": Special()}, r"state\['a'\]: .*Special cannot be saved.*register_type"),
        (
            {"a": collections.defaultdict(lambda: 0)},
            r"state\['a'\]: collections.defaultdict cannot be.*its default_fact",
        ),
        ({"a": Pair}, r"state\['a'\]: builtins.type cannot be saved"),
        ({torch.ones(1): 1}, "state: a key of type Tensor"),
        ({(1, Slots(1)): 1}, "state: a key of type tuple"),
        ({"a": {Slots(1)}}, r"state\['a'\]: builtins.set cannot be saved: it has an element of type Slots; use a list"),
        ({"a": torch.zeros(2, device="meta")}, r"state\['a'\]: torch.Tensor cannot be saved: a sparse"),
        ({"a": torch.eye(2).to_sparse()}, r"state\['a'\]: torch.Tensor cannot be saved: a sparse"),
        ({"a": numpy.array([object()])}, r"state\['a'\]: numpy.ndarray cannot be saved: its dtype is object"),
        (recursive(), "does it contain itself"),
    ],
)
def test_what_cannot_be_saved_is_refused_by_its_path(value: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        encode(value, "state", lambda path, tensor: path)


def test_a_parameter_comes_back_as_its_values_on_the_cpu() -> None:
    tree = encode(torch.nn.Parameter(torch.tensor(2.5)), "x", lambda path, tensor: path)
    with torch.device("meta"):
        back = decode(tree, lambda reference: torch.zeros(1))
    assert same(back, torch.tensor(2.5))


def test_what_mmengine_puts_into_client_state_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    class HistoryBuffer:  # as mmengine documents it
        def __init__(self, log_history: Any = (), count_history: Any = (), max_length: int = 1000) -> None:
            self.data = numpy.array(log_history), numpy.array(count_history)
            self.max_length = max_length

    name = "mmengine.logging.history_buffer"
    HistoryBuffer.__module__, HistoryBuffer.__qualname__ = name, "HistoryBuffer"
    module = types.ModuleType(name)
    module.HistoryBuffer = HistoryBuffer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)
    back = through_json({"hub": {"loss": HistoryBuffer([0.5, 0.25], [1, 2], 9)}})["hub"]["loss"]
    assert type(back) is HistoryBuffer and back.max_length == 9
    assert same(list(back.data), [numpy.array([0.5, 0.25]), numpy.array([1, 2])])
