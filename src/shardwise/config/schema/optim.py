"""Optimizer and learning-rate schedule sections."""

from __future__ import annotations

from typing import Any

from .base import ConfigSection, key
from .optimizers import ONEBIT_OPTIMIZERS
from .unused import with_unused_keys


@with_unused_keys
class Optimizer(ConfigSection):
    """`optimizer`: class and arguments of the optimizer that the engine builds."""

    type: str | None = key(
        None,
        "adam, adamw, lamb, muon, onebitadam, onebitlamb, zerooneadam, or muadam, muadamw, musgd of the package mup "
        "(any case), or the exact name of a class in torch.optim. null: the caller passes one.",
    )
    params: dict[str, Any] = key({}, "Arguments of the optimizer, such as lr and weight_decay.", free_form=True)

    @property
    def is_onebit(self) -> bool:
        """True if the optimizer communicates itself."""
        return (self.type or "").lower() in ONEBIT_OPTIMIZERS


class Scheduler(ConfigSection):
    """`scheduler`: learning-rate schedule that the engine builds and advances once per optimizer step."""

    type: str | None = key(
        None,
        "WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest, or the exact name of a class in "
        "torch.optim.lr_scheduler.",
    )
    params: dict[str, Any] = key({}, "Arguments of the schedule.", free_form=True)
