"""What a rank was given, in words that can be compared with those of other ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from shardwise.config import Resolution, effective
from shardwise.registry import part_of
from shardwise.zero.passes.rows import find_tables

_A_RANKS_OWN = frozenset(
    {
        "comet",
        "comms_logger",
        "csv_monitor",
        "dump_state",
        "flops_profiler",
        "jsonl_monitor",
        "memory_breakdown",
        "mlflow",
        "steps_per_print",
        "tensorboard",
        "timers",
        "wall_clock_breakdown",
        "wandb",
    }
)
"""Sections of the configuration that say what a rank reports, not what it computes."""

_A_MACHINES_OWN = frozenset({"checkpoint.memory_copies.directory", "timeline.path"})
"""Paths that machines may have each of its own."""


def facts_of(model: nn.Module, optimizer: torch.optim.Optimizer | None, resolution: Resolution) -> dict[str, str]:
    """Return the configuration's values, the optimizer's settings and the parameters by name."""
    facts = {f"config {path}": repr(value) for path, value in _leaves(effective(resolution))}
    groups = optimizer.param_groups if optimizer is not None else []
    group_of = {id(parameter): number for number, group in enumerate(groups) for parameter in group["params"]}
    if optimizer is not None:
        facts["optimizer"] = type(optimizer).__name__
        for number, group in enumerate(groups):
            for name, value in group.items():
                if name not in ("params", "param_names"):
                    facts[f"optimizer group {number} {name}"] = _value(value)
    tables = {id(table) for table in find_tables(model)[0]} if resolution.config.sparse_gradients else set()
    for number, (name, parameter) in enumerate(model.named_parameters(remove_duplicate=False)):
        owner = f", group {group_of[id(parameter)]}" if id(parameter) in group_of else ""
        trained = "" if parameter.requires_grad else ", frozen"
        if part_of(parameter).ranks is not None:
            facts[f"parameter {number}"] = f"a part that some ranks have, {parameter.dtype}{trained}{owner}"
            continue
        rows = ", reduced as rows" if id(parameter) in tables else ""
        facts[f"parameter {name}"] = f"{tuple(parameter.shape)} {parameter.dtype}{trained}{owner}{rows}"
    return facts


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if (not prefix and name in _A_RANKS_OWN) or f"{prefix}{name}" in _A_MACHINES_OWN:
            continue
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _value(value: Any) -> str:
    """Spell a setting; of objects only the kind, because their `repr` may hold an address."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return repr(value.item())
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, (tuple, list)):
        return f"({', '.join(_value(item) for item in value)})"
    return type(value).__name__
