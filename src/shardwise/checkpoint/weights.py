"""The unsharded state dict of an engine's module, under the names of the user's module.

Every name of a tied parameter is included, because `load_state_dict` of a plain module requires them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from shardwise.checkpoint.collect import extra_states
from shardwise.checkpoint.protocols import CheckpointedModel
from shardwise.checkpoint.selection import EXTRA, extra_name
from shardwise.checkpoint.unsharded import UnshardedTensor, UnshardedWeights


def state_dict(model: CheckpointedModel, *, exclude_frozen: bool = False, to_first: bool = False) -> dict[str, Any]:
    """Return the module's unsharded state dict on the CPU; with `to_first` other ranks than the first get an empty one.
    A collective. `exclude_frozen` leaves out parameters that do not require a gradient.
    """
    found: dict[str, Any] = {}

    def keep(tensor: UnshardedTensor, values: torch.Tensor) -> None:
        copied = values.cpu() if values.device.type != "cpu" else values.clone()
        found.update(dict.fromkeys((tensor.name, *tensor.aliases), copied))

    UnshardedWeights(model, exclude_frozen=exclude_frozen, to_first=to_first).for_each(keep)
    if to_first and model.comm.rank != 0:
        return {}
    found.update((extra_name(name), module.get_extra_state()) for name, module in extra_states(model.module))
    return {name: found[name] for name in _in_order(model.module, found)}


def _in_order(module: nn.Module, found: Iterable[str]) -> list[str]:
    """Return names in the order of a plain module's state dict; those of other ranks follow their predecessors."""
    places = {name: place for place, name in enumerate(_names(module))}
    keys: dict[str, tuple[int, bool]] = {}
    last = -1
    for name in found:
        last = places.get(name, last)
        keys[name] = last, name not in places
    return sorted(keys, key=keys.__getitem__)


def _names(module: nn.Module) -> Iterator[str]:
    for prefix, child in module.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        yield from (dot + key for key in (*child._parameters, *child._buffers, EXTRA))
