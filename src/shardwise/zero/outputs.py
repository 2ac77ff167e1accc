"""The tensors in whatever a module returns: containers, dataclasses, mappings, and plain objects with attributes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

_DEPTH = 4


def tensors_in(value: Any, depth: int = _DEPTH) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested outputs.

    What torch's pytree does not open is looked into: mappings, dataclasses, and the attributes (also slots) of other
    objects, up to `depth` levels. Modules are not outputs and are passed over.
    """
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif (
            depth
            and leaf is not None
            and not isinstance(leaf, (str, bytes, int, float, complex, type, torch.nn.Module))
        ):
            for inner in _parts(leaf):
                yield from tensors_in(inner, depth - 1)


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value.values()
    if dataclasses.is_dataclass(value):
        yield from (getattr(value, field.name, None) for field in dataclasses.fields(value))
        return
    yield from getattr(value, "__dict__", {}).values()
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if not name.startswith("__"):
                yield getattr(value, name, None)
