"""Schedules as functions of the step number, with the interface of torch's LR schedulers.

Invariant: update k = 0, 1, 2, ... uses lr(k). The constructor applies lr(0), and each `step()` after an update the next
rate. Because lr is a pure function, a run resumed at any k has the same rates as an uninterrupted run.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch.optim.lr_scheduler import LRScheduler

from shardwise.config.schema.base import Arguments
from shardwise.errors import CheckpointError, ConfigError

Rates = float | Sequence[float]  # One value for all parameter groups, or one for each.

ARGUMENT = "scheduler.params.{}"  # configuration key of a schedule's argument


class StepSchedule(LRScheduler):
    """Base class of schedules that compute each group's learning rate from the step number only.

    A subclass stores its arguments, calls `super().__init__` last, and defines `group_lr`, optionally `group_momentum`.
    As in torch, a group's rate when the first schedule is built is its own rate, stored as `group["initial_lr"]`. A
    loaded checkpoint does not replace it, so that a run resumes with a newly configured rate.

    Args:
        optimizer: its `param_groups` receive the rates.
        last_batch_iteration: number of the last finished step; -1 before the first.
    """

    _after: ClassVar[int] = 0  # Offset from the argument of `step(k)` to the step whose rate is applied.

    _given: Arguments  # Arguments of our own schedules.

    def __init__(self, optimizer: torch.optim.Optimizer, last_batch_iteration: int = -1) -> None:
        # torch's constructor is not called, because it replaces optimizer.step to check the call order and counts one
        # step.
        self.optimizer = optimizer
        self._own: list[float] = []
        self._step_count = 0  # code that adjusts torch schedulers increments it
        self._apply(_integer(last_batch_iteration, ARGUMENT.format("last_batch_iteration"), -1) + 1)

    def group_lr(self, step: int, index: int, own_lr: float) -> float:
        """Return the rate of group `index` in `step`, as a pure function; `own_lr` is the group's own rate."""
        raise NotImplementedError(f"{type(self).__name__} does not define group_lr")

    def group_momentum(self, step: int, index: int) -> float | None:
        """Return the momentum of a group, `betas[0]` or `momentum`; None for no change. Arguments as of `group_lr`."""
        return None

    @property
    def last_batch_iteration(self) -> int:
        """The step of the applied learning rate: the number of updates so far."""
        return self.last_epoch

    def lr(self, step: int) -> list[float]:
        """Return each group's learning rate in a step, without side effects."""
        return [self.group_lr(step, index, own) for index, own in enumerate(self._own_lrs())]

    def momentum(self, step: int) -> list[float | None]:
        """Return each group's momentum in a step, None for groups without schedule, without side effects."""
        return [self.group_momentum(step, index) for index in range(len(self.optimizer.param_groups))]

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return each group's current learning rate, recomputed."""
        return [*self.lr(self.last_epoch)]

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Apply the next learning rate, or that of a given step; call it after each update that was not skipped.

        As in their constructors, `LRRangeTest` and `OneCycle` treat `last_batch_iteration` as the last finished step.
        """
        self._step_count += 1
        if last_batch_iteration is None:
            self._apply(self.last_epoch + 1)
        else:
            self._apply(_integer(last_batch_iteration, "last_batch_iteration", 0) + self._after)

    def state_dict(self) -> dict[str, Any]:
        """Return {"last_batch_iteration": the step of the applied learning rate}."""
        return {"last_batch_iteration": self.last_epoch}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a saved step, its learning rate and momentum; raises a CheckpointError without a step number."""
        step = state_dict.get("last_batch_iteration")
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise CheckpointError(
                f"learning-rate schedule state 'last_batch_iteration': expected an integer >= 0, found {step!r}"
            )
        self._apply(step)

    def load_finished(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state of DeepSpeed, which has the argument of its last `step`; -1 before the first."""
        step = state_dict["last_batch_iteration"]
        self.load_state_dict({**state_dict, "last_batch_iteration": max(0, step + self._after)})

    def _value(self, name: str, index: int) -> float:
        found = getattr(self._given, name)
        if not isinstance(found, list):
            return float(found)
        groups = len(self.optimizer.param_groups)
        if len(found) != groups:
            raise ConfigError(
                f"{ARGUMENT.format(name)}: expected one value for each of the optimizer's {groups} parameter groups, "
                f"found {len(found)}"
            )
        return float(found[index])

    def _values(self, name: str) -> list[float]:
        return [self._value(name, index) for index in range(len(self.optimizer.param_groups))]

    def _own_lrs(self) -> list[float]:
        for group in self.optimizer.param_groups[len(self._own) :]:
            self._own.append(float(group.setdefault("initial_lr", float(group["lr"]))))
        return [*self._own]

    def _apply(self, step: int) -> None:
        self.last_epoch = step
        self.base_lrs = [*self._own_lrs()]
        for group, own in zip(self.optimizer.param_groups, self._own, strict=True):
            group["initial_lr"] = own
        rates = self.lr(step)
        momenta = self.momentum(step)
        for group, rate, momentum in zip(self.optimizer.param_groups, rates, momenta, strict=True):
            group["lr"] = _put(group["lr"], rate)
            if momentum is None:
                continue
            if not has_momentum(group):
                raise ConfigError(
                    f"{type(self).__name__} sets the momentum of a parameter group that has neither `betas` nor "
                    "`momentum`; return None for it from group_momentum()"
                )
            if group.get("betas"):
                first, *others = group["betas"]
                group["betas"] = (_put(first, momentum), *others)
            else:
                group["momentum"] = _put(group["momentum"], momentum)
        self._last_lr = [*rates]


def has_momentum(group: Mapping[str, Any]) -> bool:
    """Return True if a parameter group has a momentum that a schedule can set."""
    return bool(group.get("betas")) or "momentum" in group


def _put(held: Any, value: float) -> Any:
    # A tensor is filled in place, because compiled and graph-captured steps read the same tensor.
    return held.fill_(value) if isinstance(held, torch.Tensor) else value


def _integer(value: Any, name: str, least: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least:
        raise ConfigError(f"{name}: expected an integer >= {least}, found {value!r}")
    return number
