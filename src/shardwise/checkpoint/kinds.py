"""Kinds of Python values beyond JSON, and their conversion to plain values and back.

A kind is a type, its name in the file, and functions to and from plain values or other kinds. Reading calls only
functions of this table and those that the script has registered. It imports nothing and calls no method of a class that
a file names: enumerations give their members, and dataclasses are filled field by field, without `__init__`.
"""

from __future__ import annotations

import argparse
import base64
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import math
import pathlib
import sys
import types
import uuid
import zoneinfo
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy
import torch

from shardwise.checkpoint.manifest import dtype_of, name_of
from shardwise.errors import CheckpointError, UsageError

T = TypeVar("T")


class Kind(NamedTuple):
    """Name in the file, and conversions; `from_plain` raises TypeError, ValueError or LookupError for wrong values."""

    name: str
    to_plain: Callable[[Any], Any]
    from_plain: Callable[[Any], Any]


_NUMBERS = (bool, int, float)
_RAW = "biufcmMSU"
"""Kinds of numpy's dtypes with values that are plain bytes."""
_FLOATS = ("float16", "bfloat16", "float32", "float64")
_SCALARS = ("bool", "uint8", "int8", "int16", "int32", "int64", *_FLOATS)
"""Dtypes of tensors of one number that are saved as such."""
_FACTORIES = {
    kind.__name__: kind for kind in (int, float, complex, str, bytes, bool, list, tuple, dict, set, frozenset)
}
_PATHS = {
    kind.__name__: kind
    for kind in (pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.PosixPath, pathlib.WindowsPath)
}


def _from_attributes(kind: type) -> Callable[[Any], Any]:
    def made(attributes: Any) -> Any:
        value = kind()
        for name, content in checked(attributes, dict).items():
            vars(value)[checked(name, str)] = content
        return value

    return made


def checked(value: Any, *kinds: type) -> Any:
    """Return a value from a file if it is of one of these types. Raises TypeError."""
    if type(value) not in kinds:
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"expected {expected}, found {type(value).__name__}")
    return value


def _default_to_plain(value: collections.defaultdict[Any, Any]) -> Any:
    factory = value.default_factory
    name = next((name for name, known in _FACTORIES.items() if known is factory), None)
    if factory is not None and name is None:
        raise TypeError(f"its default_factory is {factory!r:.100}; use one of {', '.join(_FACTORIES)}, or dict(x)")
    return [name, dict(value)]


def _default_from_plain(plain: Any) -> Any:
    name, items = plain
    return collections.defaultdict(None if name is None else _FACTORIES[name], checked(items, dict))


def _deque_from_plain(plain: Any) -> Any:
    most, items = plain
    return collections.deque(checked(items, list), most if most is None else checked(most, int))


def _time_to_plain(value: datetime.datetime | datetime.time) -> Any:
    return [value.replace(tzinfo=None, fold=0).isoformat(), value.fold, value.tzinfo]


def _time_from_plain(kind: type[datetime.datetime] | type[datetime.time]) -> Callable[[Any], Any]:
    def made(plain: Any) -> Any:
        text, fold, zone = plain
        return kind.fromisoformat(checked(text, str)).replace(tzinfo=zone, fold=fold)

    return made


def _zone_to_plain(value: zoneinfo.ZoneInfo) -> Any:
    if value.key is None:
        raise TypeError("it has no key")
    return value.key


def _elements(values: Any) -> list[Any]:
    for value in checked(values, list):
        if not is_key(value):
            raise TypeError(f"it has an element of type {type(value).__name__}; use a list")
    return list(values)


def _path(name: Any, text: Any) -> pathlib.PurePath:
    kind = _PATHS[checked(name, str)]
    if issubclass(kind, pathlib.Path) and not isinstance(pathlib.Path(), kind):
        kind = _PATHS[f"Pure{name}"]  # of another system
    return kind(checked(text, str))


def _dtype(name: Any) -> torch.dtype:
    return dtype_of(checked(name, str))


def _attributes(name: str, kind: Callable[..., Any], *names: str, types: tuple[type, ...] = ()) -> Kind:
    """Return a kind whose plain form is a list of attributes, which make an equal object, of some `types`."""

    def made(plain: Any) -> Any:
        return kind(*(checked(part, *types) if types else part for part in plain))

    return Kind(name, lambda value: [getattr(value, each) for each in names], made)


def is_stored(tensor: torch.Tensor) -> bool:
    """Return True if a tensor is stored, False if it is a number. Raises TypeError if it cannot be saved."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise TypeError("a sparse, quantized or meta tensor; pass a dense one with values")
    return tensor.dim() > 0 or name_of(tensor.dtype) not in _SCALARS


def _tensor_from_plain(plain: Any) -> torch.Tensor:
    name, number = plain
    return torch.tensor(checked(number, *_NUMBERS), dtype=_dtype(name), device="cpu")


def array_as_tensor(value: numpy.ndarray[Any, Any]) -> torch.Tensor | None:
    """Return an array as a tensor; None for plain bytes of a dtype that torch does not have. Raises TypeError."""
    try:
        return torch.from_numpy(numpy.ascontiguousarray(value)).view(value.shape)
    except (TypeError, ValueError) as error:
        if value.dtype.kind in _RAW:
            return None
        raise TypeError(f"its dtype is {value.dtype}: {error}") from None


def _numpy_to_plain(value: Any) -> tuple[str, Any] | None:
    """Return (tag, plain values) of a scalar, an array as bytes, or a dtype."""
    if isinstance(value, numpy.dtype) and value.kind in _RAW:
        return "$numpy_dtype", value.str
    if not isinstance(value, (numpy.generic, numpy.ndarray)) or value.dtype.kind not in _RAW:
        return None
    if isinstance(value, numpy.generic) and value.dtype.kind in "biuf" and value.dtype.itemsize <= 8:
        return "$numpy_scalar", [value.dtype.str, value.item()]
    shape = list(value.shape) if isinstance(value, numpy.ndarray) else None
    return "$numpy_raw", [value.dtype.str, shape, _text_of(value.tobytes())]


def _dtype_of(name: Any, kinds: str = _RAW) -> Any:
    dtype = numpy.dtype(checked(name, str))
    if dtype.kind not in kinds:
        raise ValueError(f"{name} is not one of the types {kinds}")
    return dtype


def _number_from_plain(plain: Any) -> Any:
    name, number = plain
    return _dtype_of(name, "biuf").type(checked(number, *_NUMBERS))


def _raw_from_plain(plain: Any) -> Any:
    name, shape, text = plain
    dtype, data = _dtype_of(name), _bytes_of(text)
    if shape is None:
        return numpy.frombuffer(data, dtype, 1)[0] if dtype.itemsize else dtype.type()
    sizes = [checked(size, int) for size in shape]
    if len(data) != math.prod(sizes) * dtype.itemsize:
        raise ValueError(f"{len(data)} bytes are not {sizes} of {name}")
    return numpy.frombuffer(bytearray(data), dtype).reshape(sizes) if data else numpy.zeros(sizes, dtype)


def _text_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes_of(text: Any) -> bytes:
    return base64.b64decode(checked(text, str), validate=True)


_KINDS: dict[type, Kind] = {
    float: Kind("float", repr, lambda plain: float(checked(plain, str))),  # one that is not finite
    bytes: Kind("bytes", _text_of, _bytes_of),
    tuple: Kind("tuple", list, lambda plain: tuple(checked(plain, list))),
    argparse.Namespace: Kind("namespace", lambda value: dict(vars(value)), _from_attributes(argparse.Namespace)),
    types.SimpleNamespace: Kind("simple", lambda value: dict(vars(value)), _from_attributes(types.SimpleNamespace)),
    collections.defaultdict: Kind("defaultdict", _default_to_plain, _default_from_plain),
    collections.deque: Kind("deque", lambda value: [value.maxlen, list(value)], _deque_from_plain),
    set: Kind("set", lambda value: _elements(list(value)), lambda plain: set(_elements(plain))),
    frozenset: Kind("frozenset", lambda value: _elements(list(value)), lambda plain: frozenset(_elements(plain))),
    complex: _attributes("complex", complex, "real", "imag", types=(int, float)),
    bytearray: Kind("bytearray", bytes, lambda plain: bytearray(checked(plain, bytes))),
    range: _attributes("range", range, "start", "stop", "step"),
    slice: _attributes("slice", slice, "start", "stop", "step"),
    datetime.datetime: Kind("datetime", _time_to_plain, _time_from_plain(datetime.datetime)),
    datetime.date: Kind("date", lambda value: value.isoformat(), datetime.date.fromisoformat),
    datetime.time: Kind("time", _time_to_plain, _time_from_plain(datetime.time)),
    datetime.timedelta: _attributes(
        "timedelta", datetime.timedelta, "days", "seconds", "microseconds", types=(int, float)
    ),
    datetime.timezone: Kind(
        "timezone", lambda value: list(value.__getinitargs__()), lambda plain: datetime.timezone(*plain)
    ),
    zoneinfo.ZoneInfo: Kind("zone", _zone_to_plain, lambda plain: zoneinfo.ZoneInfo(checked(plain, str))),
    decimal.Decimal: Kind("decimal", str, lambda plain: decimal.Decimal(checked(plain, str))),
    fractions.Fraction: _attributes("fraction", fractions.Fraction, "numerator", "denominator", types=(int,)),
    uuid.UUID: Kind("uuid", lambda value: value.hex, lambda plain: uuid.UUID(checked(plain, str))),
    torch.Size: Kind("size", list, lambda plain: torch.Size([checked(part, int) for part in plain])),
    torch.dtype: Kind("dtype", name_of, _dtype),
    torch.device: Kind("device", str, lambda plain: torch.device(checked(plain, str))),
    **{
        kind: Kind("path", lambda value: [type(value).__name__, str(value)], lambda plain: _path(*plain))
        for kind in _PATHS.values()
    },
}
_BY_NAME = {kind.name: kind.from_plain for kind in _KINDS.values()}
_BY_NAME |= {"numpy_scalar": _number_from_plain, "numpy_raw": _raw_from_plain, "numpy_dtype": _dtype_of}
_BY_NAME["scalar"] = _tensor_from_plain
_registered: dict[type, Kind] = {}
_HISTORY = ("mmengine.logging.history_buffer", "HistoryBuffer")  # mmengine's runner puts it into client_state
_LIBRARIES = [
    Kind(
        ".".join(_HISTORY),
        lambda value: [*value.data, value.max_length],
        lambda plain: _class(*_HISTORY, object)(*plain),
    )
]
"""Kinds of classes of other libraries, whose names are those of module and class."""


def register_type(
    cls: type[T], to_plain: Callable[[T], Any], from_plain: Callable[[Any], T], *, name: str | None = None
) -> None:
    """Let checkpoints hold objects of your class in `client_state`.

    Call it before saving and before loading, for instance after the class's definition. Another call for a class
    replaces the first.

    Args:
        cls: the class. Objects of subclasses are not included.
        to_plain: returns the saved form of an object: None, numbers, strings, bytes, tensors, arrays, lists,
            dictionaries, or objects of other registered classes.
        from_plain: returns an equal object from the saved form.
        name: name in the file; None: module and name of the class.

    Raises:
        UsageError: an argument has a wrong type, the class needs no registration, or the name is another class's.

    Example:
        >>> class Meter:
        ...     def __init__(self, total: float) -> None:
        ...         self.total = total
        >>> register_type(Meter, lambda meter: meter.total, Meter)
    """
    if not isinstance(cls, type) or not callable(to_plain) or not callable(from_plain):
        raise UsageError(
            f"register_type(cls, to_plain, from_plain): expected a class and two functions, found {cls!r:.100}, "
            f"{to_plain!r:.100} and {from_plain!r:.100}"
        )
    if cls in _KINDS or cls in _BUILT_IN:
        raise UsageError(f"register_type(): checkpoints hold {cls.__name__} as it is; leave the call out")
    called = f"{cls.__module__}.{cls.__qualname__}" if name is None else name
    other = next((known for known, kind in _registered.items() if kind.name == called and known is not cls), None)
    if other is not None and (name is not None or f"{other.__module__}.{other.__qualname__}" != called):
        raise UsageError(f"register_type(): the name {called!r} is that of {other!r} already; pass another name")
    if other is not None:
        del _registered[other]  # the same class, defined anew
    _registered[cls] = Kind(called, to_plain, from_plain)


_BUILT_IN = (type(None), bool, int, str, list, dict, collections.OrderedDict, collections.Counter)


def to_plain(value: Any) -> tuple[str, Any] | None:
    """Return (tag, plain values) for a value of a kind, else None. Raises TypeError if it cannot be saved."""
    cls = type(value)
    called = f"{cls.__module__}.{cls.__qualname__}"
    kind = _registered.get(cls) or next((kind for kind in _LIBRARIES if kind.name == called), None)
    if kind is not None:
        return "$registered", [kind.name, kind.to_plain(value)]
    if cls in _KINDS:
        kind = _KINDS[cls]
        return f"${kind.name}", kind.to_plain(value)
    if cls in (torch.Tensor, torch.nn.Parameter):
        return "$scalar", [name_of(value.dtype), value.item()]
    if isinstance(value, enum.Enum):
        member = value.value if isinstance(value, enum.Flag) else value.name
        return "$enum", [cls.__module__, cls.__qualname__, member]
    if dataclasses.is_dataclass(cls):
        return "$dataclass", [cls.__module__, cls.__qualname__, _contents(value)]
    if not isinstance(value, type) and all(callable(getattr(cls, name, None)) for name in _STATE):
        return "$state", value.state_dict()
    return _numpy_to_plain(value)


def is_key(value: Any) -> bool:
    """Return True if a value may be a key or an element of a set: hashing it must run no code of the script."""
    if type(value) in (tuple, frozenset):
        return all(map(is_key, value))
    cls = type(value)
    plain = isinstance(value, enum.Enum) or cls in _KINDS or cls in _BUILT_IN or cls.__module__ == "numpy"
    return plain and cls.__hash__ is not None


_STATE = ("state_dict", "load_state_dict")


def _contents(value: Any) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
    return {**{name: getattr(value, name) for name in names}, **getattr(value, "__dict__", {})}


def from_plain(tag: str, plain: Any) -> Any:
    """Return the value that `to_plain` has converted.

    Raises CheckpointError if its class is missing; TypeError, ValueError, LookupError or ArithmeticError for an unknown
    tag or plain values that are not of the kind.
    """
    if tag == "$registered":
        name, content = plain
        kind = next((kind for kind in (*_registered.values(), *_LIBRARIES) if kind.name == name), None)
        if kind is None:
            raise CheckpointError(
                f"the checkpoint holds an object of {name!r:.200}, which is not registered here; call "
                "shardwise.checkpoint.register_type() for its class before loading"
            )
        return kind.from_plain(content)
    if tag == "$enum":
        module, name, member = plain
        cls = _class(module, name, enum.Enum)
        if issubclass(cls, enum.Flag):
            return cls(checked(member, int))
        return vars(cls)["_member_map_"][member]
    if tag == "$dataclass":
        module, name, contents = plain
        cls = _class(module, name, object)
        if "__dataclass_fields__" not in vars(cls) or any("__del__" in vars(base) for base in cls.__mro__):
            raise ValueError(f"{module}.{name} is no dataclass, or does something when it is deleted")
        value = object.__new__(cls)
        for key, content in checked(contents, dict).items():
            object.__setattr__(value, checked(key, str), content)
        return value
    if tag == "$state":
        return plain
    if tag.removeprefix("$") not in _BY_NAME:
        raise ValueError(f"{tag} is not known to this version")
    return _BY_NAME[tag.removeprefix("$")](plain)


def _class(module: Any, name: Any, base: type) -> Any:
    """Return a class that the script has imported, without importing or calling anything."""
    found: Any = sys.modules.get(checked(module, str))
    for part in checked(name, str).split("."):
        found = None if found is None else vars(found).get(part)
    if not isinstance(found, type) or not issubclass(found, base):
        raise CheckpointError(
            f"the checkpoint holds an object of the class {module}.{name}, which is not defined here; import it before "
            "loading"
        )
    return found
