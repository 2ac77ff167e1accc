"""Nested Python values as JSON, and back without loss and without pickle.

A value that JSON lacks is an object with one key that begins with `$`: a tuple, a dictionary with numbers as keys, a
number that is not finite (`shardwise.checkpoint.kinds` has further ones). Tensors are stored separately and referenced.
Reading gives equal values of the same types and cannot run code. Other values are refused by name before writing.
"""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy
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
_REFERENCES = ("$tensor", "$numpy")
_MAPPINGS: dict[type, str] = {dict: "$dict", collections.OrderedDict: "$ordered", collections.Counter: "$counter"}


def encode(value: Any, path: str, store_tensor: StoreTensor, depth: int = 0) -> Any:
    """Return JSON for a nested value.

    Args:
        value: None, bool, int, float, str, bytes, tensors, numpy arrays and scalars, values of
            `shardwise.checkpoint.kinds`, and lists, tuples, dict, OrderedDict and Counter of these. Subclasses count as
            other types.
        path: name of the value in messages, as `client_state`.
        store_tensor: called for every tensor that is not a single number.
        depth: levels around the value.

    Raises:
        CheckpointError: a value of another type is inside; the message names its path.

    >>> encode({"best": float("inf"), "shape": (2, 3)}, "client_state", lambda path, tensor: path)
    {'best': {'$float': 'inf'}, 'shape': {'$tuple': [2, 3]}}
    """
    if depth > _DEEPEST:
        raise CheckpointError(f"{path:.200}: nested more than {_DEEPEST} deep; does it contain itself?")
    kind = type(value)
    if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
        return value
    if kind is list:
        return [encode(item, f"{path}[{i}]", store_tensor, depth + 1) for i, item in enumerate(value)]
    if kind in _MAPPINGS:
        return _encode_mapping(value, path, store_tensor, depth)
    try:
        if kind is numpy.ndarray and (held := kinds.array_as_tensor(value)) is not None:
            return {"$numpy": store_tensor(path, held)}
        if kind in (torch.Tensor, torch.nn.Parameter) and kinds.is_stored(value):
            return {"$tensor": store_tensor(path, value.detach())}
        found = kinds.to_plain(value)
    except CheckpointError:
        raise
    except Exception as error:  # of a function of the script, too
        raise CheckpointError(f"{path}: {_name_of(kind)} cannot be saved: {error}") from error
    if found is None:
        raise CheckpointError(
            f"{path}: {_name_of(kind)} cannot be saved. Checkpoints hold plain values, dataclasses, enumerations, "
            "and of objects that have state_dict() and load_state_dict() that state. Convert it (dict(x), vars(x), "
            "...), leave it out, or call shardwise.checkpoint.register_type() for its class"
        )
    tag, plain = found
    if tag == "$registered" and type(plain[1]) is kind:
        raise CheckpointError(f"{path}: the function registered for {_name_of(kind)} returns an object of that class")
    return {tag: encode(plain, path, store_tensor, depth + 1)}


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _encode_mapping(value: dict[Any, Any], path: str, store_tensor: StoreTensor, depth: int) -> Any:
    kind = type(value)
    inner = functools.partial(encode, store_tensor=store_tensor, depth=depth + 1)
    for key in value:
        if not kinds.is_key(key):
            raise CheckpointError(
                f"{path}: a key of type {type(key).__name__} ({key!r:.100}) cannot be saved; use str, int, float, "
                "bool, None, bytes, an enumeration's member, or a tuple of these"
            )
    if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
        return {k: inner(v, f"{path}[{k!r}]") for k, v in value.items()}
    return {_MAPPINGS[kind]: [[inner(k, f"{path}: key {k!r}"), inner(v, f"{path}[{k!r}]")] for k, v in value.items()]}


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
    content = value[tag]
    try:
        if tag in _REFERENCES:
            return fetch(content) if tag == "$tensor" else fetch(content).numpy()
        for kind, name in _MAPPINGS.items():
            if tag == name:
                return kind({_key(_decode(k, fetch)): _decode(v, fetch) for k, v in content})
        return kinds.from_plain(tag, _decode(content, fetch))
    except (CheckpointError, RecursionError):
        raise
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"the value {value!r:.200} is not as written: {error}") from error


def _key(value: Any) -> Any:
    if not kinds.is_key(value):
        raise TypeError(f"a key of type {type(value).__name__}")
    return value


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
        tag = next(iter(item), "") if isinstance(item, dict) else ""
        if tag in _REFERENCES:
            yield item[tag]
        elif isinstance(item, (dict, list)):
            inside = list(item.values()) if isinstance(item, dict) else item
            waiting.extend((inner, depth + 1) for inner in reversed(inside))


def is_mapping(value: Any) -> bool:
    """Return True if JSON from `encode` represents a dictionary.

    >>> is_mapping({"a": 1}), is_mapping({"$dict": []}), is_mapping({"$tuple": []}), is_mapping("a")
    (True, True, False, False)
    """
    tag = next(iter(value), "") if isinstance(value, dict) else "$"
    return not tag.startswith("$") or tag in _MAPPINGS.values()
