"""Learning-rate and momentum schedules: pure functions of the step number, and their scheduler classes."""

from shardwise.schedules.base import StepSchedule
from shardwise.schedules.cycle import LRRangeTest, OneCycle, lr_range_test, one_cycle, one_cycle_decay
from shardwise.schedules.difficulty import CurriculumScheduler
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
    "CurriculumScheduler",
    "LRRangeTest",
    "OneCycle",
    "StepSchedule",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "build",
    "lr_range_test",
    "names",
    "one_cycle",
    "one_cycle_decay",
    "warmup",
    "warmup_cosine",
    "warmup_decay",
]
