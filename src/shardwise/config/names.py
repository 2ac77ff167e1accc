"""Names of optimizers and schedules, and models of their arguments; torch is imported only to look up classes."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any, Literal

from pydantic import create_model

from .schema.base import Anything, Arguments, Betas, Flag, NotNegative, Number
from .schema.optimizers import NATIVE_OPTIMIZERS, Mup
from .schema.optimizers import ONEBIT_OPTIMIZERS as ONEBIT_OPTIMIZERS
from .schema.schedules import NATIVE_SCHEDULES
from .schema.tables import table
from .schema_index import nearest
from .validate import show

Section = Literal["optimizer", "scheduler"]

ONEBIT_STAGES = {"onebitadam": 1, "onebitlamb": 1, "zerooneadam": 0}
"""Highest ZeRO stage of each optimizer."""

ONEBIT_STAGE_REASONS = (
    "stage 0: between averages ranks have parameters of their own, so that none can be divided",
    "stage 0 or 1: every rank compresses a momentum with its own unsharded gradient, which higher stages shard",
)
"""Reasons, by the highest stage."""

MUP_OPTIMIZERS = frozenset({"muadam", "muadamw", "musgd"})
"""Lower-case names of the optimizers of the package mup, which checks their arguments itself."""

UNUSABLE_OPTIMIZERS: dict[str, str] = table()["unusable_optimizers"]
"""Classes of torch.optim that an engine cannot step, with the reason."""

UNUSABLE_SCHEDULES: dict[str, str] = table()["unusable_schedules"]
"""Schedules of torch that a configuration cannot describe, with the reason."""


def torch_optimizers() -> dict[str, type]:
    """Return the optimizer classes of the installed torch by name."""
    import torch

    return _classes(torch.optim, torch.optim.Optimizer)


def torch_schedules() -> dict[str, type]:
    """Return the learning-rate schedules of the installed torch by name."""
    import torch

    return _classes(torch.optim.lr_scheduler, torch.optim.lr_scheduler.LRScheduler)


def _classes(module: Any, base: type) -> dict[str, type]:
    found = {name: item for name, item in vars(module).items() if isinstance(item, type) and not name.startswith("_")}
    return {name: item for name, item in found.items() if issubclass(item, base) and item is not base}


def model_of(section: Section, name: str) -> type[Arguments] | None:
    """Return the model of an optimizer's or a schedule's arguments by its configured name, or None if it is unknown."""
    if section == "scheduler":
        return NATIVE_SCHEDULES.get(name) or _model_of(torch_schedules().get(name))
    if name.lower() in MUP_OPTIMIZERS:
        return Mup
    return NATIVE_OPTIMIZERS.get(name.lower()) or _model_of(torch_optimizers().get(canonical_optimizer(name)))


def unknown(section: Section, name: str) -> str:
    """Return the message for an unknown optimizer or schedule, with the nearest names."""
    if section == "optimizer":
        kind, module = "optimizer", "torch.optim"
        usable = {*NATIVE_OPTIMIZERS, *MUP_OPTIMIZERS, *torch_optimizers()} - UNUSABLE_OPTIMIZERS.keys()
    else:
        kind, module = "schedule", "torch.optim.lr_scheduler"
        usable = {*NATIVE_SCHEDULES, *torch_schedules()} - UNUSABLE_SCHEDULES.keys()
    ordered = sorted(usable, key=lambda item: (item.lower(), item))
    ends = [item for item in ordered if name.lower().endswith(item.lower())]  # FusedAdam, CPUAdam
    close = max(ends, key=len) if ends else nearest(name, ordered)
    advice = f'did you mean "{close}"?' if close else f"known: {', '.join(ordered)}"
    return f"there is no {kind} {show(name)}, neither here nor in {module}; {advice}"


def canonical_optimizer(name: str) -> str:
    """Return an optimizer's canonical name: this library's in lower case, else torch's spelling; unchanged if unknown.

    >>> canonical_optimizer("AdamW"), canonical_optimizer("rmsprop"), canonical_optimizer("SGD")
    ('adamw', 'RMSprop', 'SGD')
    """
    lower = name.lower()
    if lower in NATIVE_OPTIMIZERS or lower in MUP_OPTIMIZERS:
        return lower
    known = torch_optimizers()
    if name in known:
        return name
    return next((spelled for spelled in known if spelled.lower() == lower), name)


_AT_LEAST_ZERO = ("lr", "eps", "weight_decay", "momentum")


@cache
def _model_of(found: type | None) -> type[Arguments] | None:
    """Return the model of a class of torch: its arguments except the engine's, with the types of their defaults."""
    if found is None:
        return None
    parameters = [
        item for item in inspect.signature(found).parameters.values() if item.name not in ("params", "optimizer")
    ]
    fields: dict[str, Any] = {
        item.name: (_type(item.name, item.default), ... if item.default is item.empty else item.default)
        for item in parameters
    }
    return create_model(found.__name__, __base__=Arguments, **fields)


def _type(name: str, default: Any) -> Any:
    if name == "betas":
        return Betas
    if isinstance(default, bool):
        return Flag
    if isinstance(default, int | float):
        return NotNegative if name in _AT_LEAST_ZERO else Number
    if name in _AT_LEAST_ZERO and not isinstance(default, tuple):
        return NotNegative if default is inspect.Parameter.empty else NotNegative | None
    return Anything
