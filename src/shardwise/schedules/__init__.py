"""Learning-rate and momentum schedules: pure functions of the step number, and their scheduler classes."""

from shardwise.schedules.arguments import (
    add_tuning_arguments,
    get_config_from_args,
    get_lr_from_config,
    override_params,
    parse_arguments,
)
from shardwise.schedules.base import StepSchedule
from shardwise.schedules.cycle import LRRangeTest, OneCycle, lr_range_test, one_cycle, one_cycle_decay
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
    "LRRangeTest",
    "OneCycle",
    "StepSchedule",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "add_tuning_arguments",
    "build",
    "get_config_from_args",
    "get_lr_from_config",
    "lr_range_test",
    "names",
    "one_cycle",
    "one_cycle_decay",
    "override_params",
    "parse_arguments",
    "warmup",
    "warmup_cosine",
    "warmup_decay",
]
