"""`WarmupDecayLR` with DeepSpeed's default."""

from __future__ import annotations

from typing import Any

import torch

from shardwise import schedules
from shardwise.schedules.base import Rates


class _Schedule(type):
    def __instancecheck__(cls, instance: Any) -> bool:  # engines have the schedule of shardwise
        own = cls is WarmupDecayLR and isinstance(instance, schedules.WarmupDecayLR)
        return own or super().__instancecheck__(instance)


class WarmupDecayLR(schedules.WarmupDecayLR, metaclass=_Schedule):
    """Warm-up to 0.001, unless a rate is given, then linear decay; `warmup_max_lr` None: each group's own rate."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates | None = 1e-3,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        warmup = (warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type)
        super().__init__(optimizer, total_num_steps, *warmup, last_batch_iteration)
