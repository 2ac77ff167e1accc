"""The tensors in nested arguments and results of modules: containers, dataclasses, mappings, and plain objects."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a nested value: containers, dataclasses, and objects with attributes, but no modules."""
    found: list[torch.Tensor] = []
    pending = [value]
    seen: set[int] = set()
    while pending:
        for item in tree_leaves(pending.pop()):
            if isinstance(item, torch.Tensor):
                found.append(item)
            elif id(item) not in seen:
                seen.add(id(item))
                pending.extend(_parts(item).values())
    return found


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a nested value (as of `tensors_in`) with every tensor replaced; objects that hold some are copied."""
    return _mapped(value, change, {})


# No closures: two that call each other form a cycle, which would keep the tensors until Python collects garbage.
def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor], done: dict[int, Any]) -> Any:
    leaves, form = tree_flatten(value)
    changed = [change(leaf) if isinstance(leaf, torch.Tensor) else _opened(leaf, change, done) for leaf in leaves]
    same = all(new is old for new, old in zip(changed, leaves, strict=True))
    return value if same else tree_unflatten(changed, form)


def _opened(item: Any, change: Callable[[torch.Tensor], torch.Tensor], done: dict[int, Any]) -> Any:
    if id(item) not in done:
        done[id(item)] = item
        parts = _parts(item)
        new = {key: _mapped(part, change, done) for key, part in parts.items()}
        if any(new[key] is not part for key, part in parts.items()):
            done[id(item)] = _with_parts(item, new)
    return done[id(item)]


def _parts(item: Any) -> Mapping[Any, Any]:
    """Return the content of an object that is no container of torch, by key or attribute name."""
    if item is None or isinstance(item, (str, bytes, int, float, complex, type, nn.Module)) or callable(item):
        return {}
    if isinstance(item, Mapping):
        return item
    if dataclasses.is_dataclass(item):
        return {field.name: getattr(item, field.name, None) for field in dataclasses.fields(item)}
    slots = [name for cls in type(item).__mro__ for name in getattr(cls, "__slots__", ())]
    named = {name: getattr(item, name) for name in slots if isinstance(name, str) and hasattr(item, name)}
    return {**named, **getattr(item, "__dict__", {})}


def _with_parts(item: Any, parts: Mapping[Any, Any]) -> Any:
    result = copy.copy(item)
    for key, part in parts.items():
        if isinstance(item, Mapping):
            result[key] = part
        else:
            object.__setattr__(result, key, part)
    return result
