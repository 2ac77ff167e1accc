"""Registry of schedules by the configuration's `type` and `params`: our own, then `torch.optim.lr_scheduler`.

torch's schedules follow the same convention: the constructor applies the rate of step 0, and `step()` is called after
each update.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import lr_scheduler

from shardwise.config.argument_models import checked
from shardwise.config.names import UNUSABLE_SCHEDULES, model_of, torch_schedules, unknown
from shardwise.errors import ConfigError
from shardwise.schedules.base import ARGUMENT, StepSchedule
from shardwise.schedules.cycle import LRRangeTest, OneCycle
from shardwise.schedules.warmup import WarmupCosineLR, WarmupDecayLR, WarmupLR

_OURS: dict[str, type[StepSchedule]] = {
    cls.__name__: cls for cls in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}

VALID_LR_SCHEDULES = list(_OURS)  # names of our own schedules


def build(name: str, optimizer: torch.optim.Optimizer, params: Mapping[str, Any]) -> lr_scheduler.LRScheduler:
    """Build the schedule of `scheduler.type` and `scheduler.params`, and apply its rate of step 0.

    Raises:
        ConfigError: the name or an option is unknown, a required option is missing, or a value is invalid.

    >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    >>> build("WarmupLR", optimizer, {"warmup_num_steps": 10}).get_last_lr()
    [0.0]
    >>> build("SteppLR", optimizer, {})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    shardwise.errors.ConfigError: scheduler.type: there is no schedule "SteppLR" (string), ...
    """
    if name in UNUSABLE_SCHEDULES:
        raise ConfigError(f"scheduler.type: {name} cannot be built from a configuration: {UNUSABLE_SCHEDULES[name]}")
    model = model_of("scheduler", name)
    if model is None:
        raise ConfigError(f"scheduler.type: {unknown('scheduler', name)}")
    found = checked(model, params, ARGUMENT, name)
    try:
        return _classes()[name](optimizer, **{key: getattr(found, key) for key in params})
    except ConfigError:
        raise
    except (TypeError, ValueError, KeyError) as error:
        given = ", ".join(f"{key}={value!r}" for key, value in params.items())
        raise ConfigError(f"scheduler.params: {name} refuses ({given}): {error}") from error


def names() -> list[str]:
    """Return the names that `build` accepts."""
    return [name for name in _classes() if name not in UNUSABLE_SCHEDULES]


def _classes() -> dict[str, Any]:
    return {**torch_schedules(), **_OURS}
