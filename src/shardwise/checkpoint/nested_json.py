"""Nested Python values as JSON, and back without loss and without pickle.

A value that JSON lacks is an object with one key that begins with `$`: a tuple, a dictionary with numbers as keys, a
number that is not finite (`shardwise.checkpoint.kinds` has further ones). Tensors are stored separately and referenced.
Reading gives equal values of the same types and cannot run code. Other values are refused by name before writing.
"""

from __future__ import annotations

import base64
import collections
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from shardwise.checkpoint import kinds
from shardwise.errors import CheckpointError

StoreTensor = Callable[[str, torch.Tensor], Any]
"""Stores a tensor by its path inside the value; returns the JSON reference to write."""

Fetch = Callable[[Any], torch.Tensor]
"""Returns the tensor of a reference from `StoreTensor`."""

_DEEPEST = 100
_LEVELS = 4
"""Maximum JSON levels per level of the value."""
_SCALARS = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    )
}
_MAPPINGS: dict[type, str] = {
    dict: "$dict",
    collections.OrderedDict: "$ordered",
    collections.Counter: "$counter",
}
_NUMBERS = (bool, int, float)
_RAW = "biufcmMSU"
"""Kinds of numpy's dtypes with values that are plain bytes."""


def encode(value: Any, path: str, store_tensor: StoreTensor) -> Any:
    """Return JSON for a nested value.

    Args:
        value: None, bool, int, float, str, bytes, tensors, numpy arrays and scalars, values of
            `shardwise.checkpoint.kinds`, and lists, tuples, dict, OrderedDict and Counter of these. Subclasses count as
            other types.
        path: name of the value in messages, as `client_state`.
        store_tensor: called for every tensor that is not a single number.

    Raises:
        CheckpointError: a value of another type is inside; the message names its path.

    >>> encode({"best": float("inf"), "shape": (2, 3)}, "client_state", lambda path, tensor: path)
    {'best': {'$float': 'inf'}, 'shape': {'$tuple': [2, 3]}}
    """
    return _encode(value, path, store_tensor, 0)


def _encode(value: Any, path: str, store_tensor: StoreTensor, depth: int) -> Any:
    if depth > _DEEPEST:
        raise CheckpointError(f"{path}: nested more than {_DEEPEST} deep; does it contain itself?")
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    if kind in (list, tuple):
        items = [_encode(item, f"{path}[{i}]", store_tensor, depth + 1) for i, item in enumerate(value)]
        return items if kind is list else {"$tuple": items}
    if kind in _MAPPINGS:
        return _encode_mapping(value, path, store_tensor, depth)
    if isinstance(value, torch.Tensor) and not kinds.is_registered(kind):
        return _encode_tensor(value, path, store_tensor)
    try:
        found = kinds.to_plain(value)
    except CheckpointError:
        raise
    except Exception as error:  # of a function of the script, too
        raise CheckpointError(f"{path}: {_name_of(kind)} cannot be saved: {error}") from error
    if found is None:
        return _encode_numpy(value, path, store_tensor)
    tag, plain = found
    if tag == "$registered" and type(plain[1]) is kind:
        raise CheckpointError(f"{path}: the function registered for {_name_of(kind)} returns an object of that class")
    return {tag: _encode(plain, path, store_tensor, depth + 1)}


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _encode_mapping(value: dict[Any, Any], path: str, store_tensor: StoreTensor, depth: int) -> Any:
    kind = type(value)
    for key in value:
        if not kinds.is_key(key):
            raise CheckpointError(
                f"{path}: a key of type {type(key).__name__} ({key!r:.100}) cannot be saved; use str, int, float, "
                "bool, None, bytes, an enumeration's member, or a tuple of these"
            )
    if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
        return {k: _encode(v, f"{path}[{k!r}]", store_tensor, depth + 1) for k, v in value.items()}
    pairs = [
        [
            _encode(k, f"{path}: key {k!r}", store_tensor, depth + 1),
            _encode(v, f"{path}[{k!r}]", store_tensor, depth + 1),
        ]
        for k, v in value.items()
    ]
    return {_MAPPINGS[kind]: pairs}


def _encode_tensor(value: torch.Tensor, path: str, store_tensor: StoreTensor) -> Any:
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        raise CheckpointError(
            f"{path}: a tensor of class {type(value).__name__} cannot be saved here; pass a plain torch.Tensor"
        )
    if value.layout is not torch.strided or value.is_quantized or value.is_meta:
        raise CheckpointError(
            f"{path}: a sparse, quantized or meta tensor cannot be saved; pass a dense one with values"
        )
    name = str(value.dtype).removeprefix("torch.")
    if value.dim() == 0 and name in _SCALARS:
        return {"$scalar": [name, _encode(value.item(), path, store_tensor, 0)]}
    return {"$tensor": store_tensor(path, value.detach())}


def _encode_numpy(value: Any, path: str, store_tensor: StoreTensor) -> Any:
    import numpy

    if isinstance(value, numpy.generic) and value.dtype.kind in "biuf" and value.dtype.itemsize <= 8:
        return {"$numpy_scalar": [value.dtype.str, _encode(value.item(), path, store_tensor, 0)]}
    if isinstance(value, numpy.generic) and value.dtype.kind in _RAW:
        return {"$numpy_raw": [value.dtype.str, None, base64.b64encode(value.tobytes()).decode()]}
    if isinstance(value, numpy.dtype) and value.kind in _RAW:
        return {"$numpy_dtype": value.str}
    if type(value) is numpy.ndarray:
        try:
            return {"$numpy": store_tensor(path, torch.from_numpy(numpy.ascontiguousarray(value)).view(value.shape))}
        except (TypeError, ValueError) as error:
            if value.dtype.kind in _RAW:
                return {"$numpy_raw": [value.dtype.str, list(value.shape), base64.b64encode(value.tobytes()).decode()]}
            raise CheckpointError(f"{path}: a numpy array of dtype {value.dtype} cannot be saved: {error}") from None
    raise CheckpointError(
        f"{path}: {_name_of(type(value))} cannot be saved. Checkpoints hold plain values, dataclasses, enumerations, "
        "and of objects that have state_dict() and load_state_dict() that state. Convert it (dict(x), vars(x), ...), "
        "leave it out, or call shardwise.checkpoint.register_type() for its class"
    )


def decode(value: Any, fetch: Fetch) -> Any:
    """Return the value that `encode` has encoded; `fetch` is called for every reference to a tensor.

    >>> decode({"best": {"$float": "inf"}, "shape": {"$tuple": [2, 3]}}, torch.tensor)
    {'best': inf, 'shape': (2, 3)}
    """
    try:
        return _decode(value, fetch)
    except RecursionError:
        raise CheckpointError("a value is nested deeper than any that was written") from None


def _decode(value: Any, fetch: Fetch) -> Any:
    if isinstance(value, list):
        return [_decode(item, fetch) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if not tag.startswith("$"):
        return {key: _decode(item, fetch) for key, item in value.items()}
    try:
        return _decode_tagged(tag, value[tag], fetch)
    except (CheckpointError, RecursionError):
        raise
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"the value {value!r:.200} is not as written: {error}") from error


def _decode_tagged(tag: str, content: Any, fetch: Fetch) -> Any:
    if tag == "$float":
        return float(kinds.checked(content, str))
    if tag == "$tuple":
        return tuple(_decode(item, fetch) for item in content)
    if tag == "$bytes":
        return base64.b64decode(kinds.checked(content, str), validate=True)
    if tag == "$tensor":
        return fetch(content)
    if tag == "$numpy":
        return fetch(content).numpy()
    if tag == "$scalar":
        name, number = content
        return torch.tensor(kinds.checked(_decode(number, fetch), *_NUMBERS), dtype=_SCALARS[name], device="cpu")
    if tag == "$numpy_scalar":
        import numpy

        name, number = content
        dtype = numpy.dtype(kinds.checked(name, str))
        if dtype.kind not in "biuf":
            raise ValueError(f"{name} is not a type of numbers")
        return dtype.type(kinds.checked(_decode(number, fetch), *_NUMBERS))
    if tag == "$numpy_raw":
        return _decode_raw(*content)
    if tag == "$numpy_dtype":
        return _raw_dtype(content)
    for kind, name in _MAPPINGS.items():
        if tag == name:
            return kind({_key(_decode(k, fetch)): _decode(v, fetch) for k, v in content})
    if not kinds.is_known(tag):
        raise ValueError(f"{tag} is not known to this version")
    return kinds.from_plain(tag, _decode(content, fetch))


def _key(value: Any) -> Any:
    if not kinds.is_key(value):
        raise TypeError(f"a key of type {type(value).__name__}")
    return value


def _raw_dtype(name: Any) -> Any:
    import numpy

    dtype = numpy.dtype(kinds.checked(name, str))
    if dtype.kind not in _RAW:
        raise ValueError(f"{name} is not a type of plain bytes")
    return dtype


def _decode_raw(name: Any, shape: Any, text: Any) -> Any:
    import numpy

    dtype, data = _raw_dtype(name), base64.b64decode(kinds.checked(text, str), validate=True)
    if shape is None:
        return numpy.frombuffer(data, dtype, 1)[0] if dtype.itemsize else dtype.type()
    sizes = [kinds.checked(size, int) for size in shape]
    if len(data) != math.prod(sizes) * dtype.itemsize:
        raise ValueError(f"{len(data)} bytes are not {sizes} of {name}")
    return numpy.frombuffer(bytearray(data), dtype).reshape(sizes) if data else numpy.zeros(sizes, dtype)


def references(value: Any) -> Iterator[Any]:
    """Yield the references to tensors in JSON from `encode`. Raises CheckpointError if it is nested too deeply.

    >>> list(references({"a": [{"$tensor": "first"}, {"$tuple": [{"$numpy": "second"}]}]}))
    ['first', 'second']
    """
    waiting = [(value, 0)]
    while waiting:
        item, depth = waiting.pop()
        if depth > _DEEPEST * _LEVELS:
            raise CheckpointError("a value is nested deeper than any that was written")
        if isinstance(item, dict):
            tag = next(iter(item), "")
            if tag in ("$tensor", "$numpy"):
                yield item[tag]
            elif tag.startswith("$"):
                # Counts levels of the value; pairs of keys and values are no level.
                inside = item[tag] if isinstance(item[tag], list) else []
                if tag in _MAPPINGS.values():
                    inside = [part for pair in inside if isinstance(pair, list) for part in pair]
                waiting.extend((inner, depth + 1) for inner in reversed(inside))
            else:
                waiting.extend((inner, depth + 1) for inner in reversed(item.values()))
        elif isinstance(item, list):
            waiting.extend((inner, depth + 1) for inner in reversed(item))


def is_mapping(value: Any) -> bool:
    """Return True if JSON from `encode` represents a dictionary.

    >>> is_mapping({"a": 1}), is_mapping({"$dict": []}), is_mapping({"$tuple": []}), is_mapping("a")
    (True, True, False, False)
    """
    tag = next(iter(value), "") if isinstance(value, dict) else "$"
    return not tag.startswith("$") or tag in _MAPPINGS.values()
