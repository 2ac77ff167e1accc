"""Learning-rate schedules: pure functions of the step number, and the classes that apply them."""

from shardwise.schedules.base import StepSchedule
from shardwise.schedules.registry import VALID_LR_SCHEDULES, build, names
from shardwise.schedules.warmup import (
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    warmup,
    warmup_cosine,
    warmup_decay,
)

__all__ = [
    "VALID_LR_SCHEDULES",
    "StepSchedule",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "build",
    "names",
    "warmup",
    "warmup_cosine",
    "warmup_decay",
]
