"""Warm-up schedules: constant, linear decay or cosine decay after the warm-up.

The rate starts low because the first updates are the least reliable (Goyal et al., 2017); cosine decay is by Loshchilov
and Hutter (2017). The formulas match published configuration files. The functions are pure in `k`, the number of
earlier updates, with values in [0, 1]; `N` = max(2, warmup_num_steps), `T` = total_num_steps. The classes scale them.
"""

from __future__ import annotations

import logging
import math

import torch

from shardwise.config.argument_models import called
from shardwise.config.schema import schedules as schema
from shardwise.schedules.base import ARGUMENT, Rates, StepSchedule

_log = logging.getLogger("shardwise")


def warmup(step: int, warmup_num_steps: int, warmup_type: str = "log") -> float:
    """Return the fraction of the full rate in step k, from 0 in step 0 up to 1.

    log: ln(k + 1) / ln(N), which is 1 from step N - 1; linear: k / N, which is 1 from step N.

    >>> [warmup(k, 4, "linear") for k in range(6)]
    [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    """
    length = max(2, warmup_num_steps)
    if step >= length:
        return 1.0
    return math.log(step + 1) / math.log(length) if warmup_type == "log" else step / length


def warmup_decay(step: int, warmup_num_steps: int, total_num_steps: int, warmup_type: str = "log") -> float:
    """Return the fraction of the full rate with linear decay after the warm-up.

    (T - k) / (T - N) from step N on: 1 in step N, 0 from step T.

    >>> [warmup_decay(k, 2, 6, "linear") for k in range(8)]
    [0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """
    length = max(2, warmup_num_steps)
    if step < length:
        return warmup(step, warmup_num_steps, warmup_type)
    return max(0.0, (total_num_steps - step) / max(1, total_num_steps - length))


def warmup_cosine(
    step: int,
    warmup_num_steps: int,
    total_num_steps: int,
    warmup_min_ratio: float = 0.0,
    cos_min_ratio: float = 1e-4,
    warmup_type: str = "log",
) -> float:
    """Return the fraction of the full rate with cosine decay after the warm-up.

    The warm-up goes from `warmup_min_ratio` to 1. From step N on it is c + (1 - c) (1 + cos(pi r)) / 2 with
    r = (k - N + 1) / (T - N), at most 1, and c = `cos_min_ratio`: c from step T - 1.

    >>> [round(warmup_cosine(k, 2, 6, cos_min_ratio=0.0, warmup_type="linear"), 3) for k in range(7)]
    [0.0, 0.5, 0.854, 0.5, 0.146, 0.0, 0.0]
    """
    length = max(2, warmup_num_steps)
    if step < length:
        return warmup_min_ratio + (1.0 - warmup_min_ratio) * warmup(step, warmup_num_steps, warmup_type)
    done = min(1.0, (step - length + 1) / max(1, total_num_steps - length))
    return cos_min_ratio + (1.0 - cos_min_ratio) * (1.0 + math.cos(math.pi * done)) / 2.0


class _Warmup(StepSchedule):
    _given: schema.Warmup

    @property
    def warmup_num_steps(self) -> int:
        return max(2, self._given.warmup_num_steps)

    @property
    def warmup_type(self) -> str:
        return self._given.warmup_type


class WarmupLR(_Warmup):
    """Warm-up from a minimum to a maximum, then constant.

    Args:
        optimizer: its groups receive the rates.
        warmup_min_lr: rate of step 0, one for all groups or one each.
        warmup_max_lr: rate after the warm-up, one for all groups or one each. None: each group's own rate.
        warmup_num_steps: length of the warm-up; 0 and 1 count as 2.
        warmup_type: "log" or "linear".
        last_batch_iteration: number of the last finished step; -1 before the first.

    Raises:
        ConfigError: a value is invalid, or a list has not one value for each group.

    >>> weight = torch.zeros(1, requires_grad=True)
    >>> optimizer = torch.optim.SGD([weight], lr=0.4)
    >>> schedule = WarmupLR(optimizer, warmup_num_steps=4, warmup_type="linear")
    >>> for _ in range(3):
    ...     optimizer.step()
    ...     schedule.step()
    >>> [round(rate, 3) for rate in schedule.get_last_lr()]
    [0.3]
    """

    _given: schema.WarmupLRArguments

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self._given = called(schema.WarmupLRArguments, locals(), ARGUMENT)
        super().__init__(optimizer, last_batch_iteration)

    @property
    def min_lrs(self) -> list[float]:
        """Each group's rate in step 0."""
        return self._values("warmup_min_lr")

    @property
    def max_lrs(self) -> list[float]:
        """Each group's rate after the warm-up."""
        return self._own_lrs() if self._given.warmup_max_lr is None else self._values("warmup_max_lr")

    def fraction(self, step: int) -> float:
        """Return the position between minimum (0) and maximum (1) in a step."""
        return warmup(step, self._given.warmup_num_steps, self._given.warmup_type)

    def group_lr(self, step: int, index: int, own_lr: float) -> float:
        """Return min + (max - min) x fraction(step)."""
        least = self._value("warmup_min_lr", index)
        most = own_lr if self._given.warmup_max_lr is None else self._value("warmup_max_lr", index)
        return least + (most - least) * self.fraction(step)


class WarmupDecayLR(WarmupLR):
    """`WarmupLR`, then linear decay to the minimum in step `total_num_steps`."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self._total = _total_steps(called(schema.WarmupDecayLRArguments, locals(), ARGUMENT))
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)

    @property
    def total_num_steps(self) -> int:
        """Steps until the rate returns to the minimum."""
        return self._total

    def fraction(self, step: int) -> float:
        """Return the position between minimum (0) and maximum (1) in a step."""
        return warmup_decay(step, self._given.warmup_num_steps, self._total, self._given.warmup_type)


class WarmupCosineLR(_Warmup):
    """Warm-up, then cosine decay, as fractions of each group's own rate.

    Args:
        optimizer: its groups receive the rates.
        total_num_steps: steps until the end of the decay.
        warmup_min_ratio: fraction of the own rate in step 0.
        warmup_num_steps: length of the warm-up; 0 and 1 count as 2.
        cos_min_ratio: fraction of the own rate at the end.
        warmup_type: "log" or "linear".
        last_batch_iteration: number of the last finished step; -1 before the first.

    Raises:
        ConfigError: a value is invalid.
    """

    _given: schema.WarmupCosineLRArguments

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 1e-4,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self._given = called(schema.WarmupCosineLRArguments, locals(), ARGUMENT)
        _total_steps(self._given)
        super().__init__(optimizer, last_batch_iteration)

    @property
    def total_num_steps(self) -> int:
        """Steps until the end of the decay."""
        return self._given.total_num_steps

    @property
    def warmup_min_ratio(self) -> float:
        """Fraction of the own rate in step 0."""
        return self._given.warmup_min_ratio

    @property
    def cos_min_ratio(self) -> float:
        """Fraction of the own rate at the end."""
        return self._given.cos_min_ratio

    def fraction(self, step: int) -> float:
        """Return the fraction of the own rate in one step."""
        given = self._given
        return warmup_cosine(
            step,
            given.warmup_num_steps,
            given.total_num_steps,
            given.warmup_min_ratio,
            given.cos_min_ratio,
            given.warmup_type,
        )

    def get_lr_ratio(self) -> float:
        """Return the current fraction of the own rate, recomputed."""
        return self.fraction(self.last_epoch)

    def group_lr(self, step: int, index: int, own_lr: float) -> float:
        """Return own_lr x fraction(step)."""
        return own_lr * self.fraction(step)


def _total_steps(given: schema.WarmupDecayLRArguments | schema.WarmupCosineLRArguments) -> int:
    if given.total_num_steps < given.warmup_num_steps:
        _log.warning(
            "scheduler.params: the warm-up (warmup_num_steps %d) is longer than the whole schedule (total_num_steps "
            "%d), so the full rate is never reached",
            given.warmup_num_steps,
            given.total_num_steps,
        )
    return given.total_num_steps
