"""Building a schedule from the `type` and `params` of the configuration.

Names are resolved in this order: our own, by exact name; classes of `torch.optim.lr_scheduler`, by exact name.
torch's schedules follow the same convention: after construction the rate of step 0 is in force; `step()` is called
after each update.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim import lr_scheduler

from shardwise.config.names import UNUSABLE_SCHEDULES
from shardwise.errors import ConfigError
from shardwise.schedules.base import StepSchedule
from shardwise.schedules.cycle import LRRangeTest, OneCycle
from shardwise.schedules.warmup import WarmupCosineLR, WarmupDecayLR, WarmupLR

_OURS: dict[str, type[StepSchedule]] = {
    cls.__name__: cls for cls in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}

VALID_LR_SCHEDULES = list(_OURS)
"""Names of our own schedules."""


def build(name: str, optimizer: torch.optim.Optimizer, params: Mapping[str, Any]) -> lr_scheduler.LRScheduler:
    """Build the schedule that the configuration names; the rate of step 0 is in force afterwards.

    Args:
        name: `scheduler.type`.
        optimizer: its groups are given the rates.
        params: `scheduler.params`; not changed.

    Raises:
        ConfigError: the name or an option is unknown, a required one is missing, or a value has no meaning.

    >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    >>> build("WarmupLR", optimizer, {"warmup_num_steps": 10}).get_last_lr()
    [0.0]
    >>> build("SteppLR", optimizer, {})
    Traceback (most recent call last):
        ...
    shardwise.errors.ConfigError: scheduler.type: unknown schedule 'SteppLR'; did you mean StepLR?
    """
    if name in UNUSABLE_SCHEDULES:
        raise ConfigError(f"scheduler.type: {name} cannot be built from a configuration: {UNUSABLE_SCHEDULES[name]}")
    cls = _classes().get(name)
    if cls is None:
        raise ConfigError(f"scheduler.type: unknown schedule {name!r}{_suggestion(name, names())}")
    _check_arguments(cls, params)
    try:
        return cls(optimizer, **params)
    except ConfigError:
        raise
    except (TypeError, ValueError, KeyError) as error:
        given = ", ".join(f"{key}={value!r}" for key, value in params.items())
        raise ConfigError(f"scheduler.params: {name} refuses ({given}): {error}") from error


def names() -> list[str]:
    """Return the names that `build` accepts."""
    return [name for name in _classes() if name not in UNUSABLE_SCHEDULES]


def _classes() -> dict[str, type[Any]]:
    return {**{name: getattr(lr_scheduler, name) for name in lr_scheduler.__all__}, **_OURS}


def _check_arguments(cls: type[Any], params: Mapping[str, Any]) -> None:
    known = {name: parameter for name, parameter in inspect.signature(cls).parameters.items() if name != "optimizer"}
    for key, value in params.items():
        if key not in known:
            raise ConfigError(
                f"scheduler.params.{key}: {cls.__name__} has no such option{_suggestion(key, known)} (it has "
                f"{', '.join(known)})"
            )
        if isinstance(value, str) and value == "auto":
            raise ConfigError(
                f"scheduler.params.{key}: 'auto' has to be replaced by a value before the schedule is built"
            )
    for key, parameter in known.items():
        if parameter.default is inspect.Parameter.empty and key not in params:
            raise ConfigError(f"scheduler.params.{key}: {cls.__name__} needs this option; add it")


def _suggestion(name: str, known: Iterable[str]) -> str:
    lower = {entry.lower(): entry for entry in known}
    near = difflib.get_close_matches(name.lower(), lower, n=2, cutoff=0.7)
    return f"; did you mean {' or '.join(lower[entry] for entry in near)}?" if near else ""
