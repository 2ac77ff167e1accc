"""A schedule as a function of the step number, behind the interface of torch's schedulers.

Step k is the (k+1)-th update of the parameters: k = 0, 1, 2, ...

Invariant: update k really uses lr(k). The constructor puts lr(0) in force, so the first update does not run
with the optimizer's own rate, and each `step()` after an update puts the next rate in force. Since lr is a
pure function, resuming at any k gives the same rates as never having stopped.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch.optim.lr_scheduler import LRScheduler

from shardwise.config.schema.base import Arguments
from shardwise.errors import CheckpointError, ConfigError

Rates = float | Sequence[float]
"""One value for all parameter groups, or one for each."""

ARGUMENT = "scheduler.params.{}"
"""Where an argument of a schedule stands."""


class StepSchedule(LRScheduler):
    """Base of schedules that compute each group's learning rate from the step number alone.

    A subclass stores its arguments, calls `super().__init__` last, and defines `group_lr`; if it also schedules the
    momentum, `group_momentum`.

    Args:
        optimizer: its `param_groups` are given the rates. The rate that a group has when the first schedule
            is built is its own rate, remembered as `group["initial_lr"]` (torch does the same).
        last_batch_iteration: number of the last finished step; -1 before the first. lr(last_batch_iteration
            + 1) is put in force.
    """

    _after: ClassVar[int] = 0
    """How many steps after the one that `step(k)` names is the one whose rate it puts in force."""

    _given: Arguments
    """Arguments of our own schedules."""

    def __init__(self, optimizer: torch.optim.Optimizer, last_batch_iteration: int = -1) -> None:
        # torch's constructor is not called: it would replace optimizer.step to warn about the order of
        # calls, and would count one step.
        self.optimizer = optimizer
        self._step_count = 0  # public code that adjusts torch schedulers increments it
        self._apply(_integer(last_batch_iteration, ARGUMENT.format("last_batch_iteration"), -1) + 1)

    def group_lr(self, step: int, index: int, own_lr: float) -> float:
        """Return the learning rate of one parameter group in one step. Must depend on nothing else.

        Args:
            step: number of updates made before, from 0.
            index: position of the group in `optimizer.param_groups`.
            own_lr: the group's own rate.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define group_lr")

    def group_momentum(self, step: int, index: int) -> float | None:
        """Return the momentum of one parameter group in one step, or None to leave it alone. As pure as `group_lr`.

        It is put in force as `betas[0]` of a group that has `betas`, and as `momentum` of one that has that.

        Args:
            step: number of updates made before, from 0.
            index: position of the group in `optimizer.param_groups`.
        """
        return None

    @property
    def last_batch_iteration(self) -> int:
        """The step whose learning rate is in force: the number of updates made so far."""
        return self.last_epoch

    def lr(self, step: int) -> list[float]:
        """Return each group's learning rate in a given step; changes nothing."""
        return [self.group_lr(step, index, own) for index, own in enumerate(self._own_lrs())]

    def momentum(self, step: int) -> list[float | None]:
        """Return each group's momentum in a given step, None where the schedule leaves it alone; changes nothing."""
        return [self.group_momentum(step, index) for index in range(len(self.optimizer.param_groups))]

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return each group's learning rate in force, computed anew."""
        return [*self.lr(self.last_epoch)]

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Put the next learning rate in force; call it after each update that was not skipped.

        Args:
            last_batch_iteration: put the rate of this step in force instead; `LRRangeTest` and `OneCycle` take it for
                the last finished step, as their constructors do, and put the rate of the one after it in force.
        """
        self._step_count += 1
        if last_batch_iteration is None:
            self._apply(self.last_epoch + 1)
        else:
            self._apply(_integer(last_batch_iteration, "last_batch_iteration", 0) + self._after)

    def state_dict(self) -> dict[str, Any]:
        """Return {"last_batch_iteration": the step whose learning rate is in force}."""
        return {"last_batch_iteration": self.last_epoch}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on at a saved step: its learning rate (and momentum) is put in force at once.

        Raises:
            CheckpointError: the state has no step number.
        """
        step = state_dict.get("last_batch_iteration")
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise CheckpointError(
                f"learning-rate schedule state 'last_batch_iteration': expected an integer >= 0, found {step!r}"
            )
        self._apply(step)

    def _value(self, name: str, index: int) -> float:
        """Return an argument for one parameter group."""
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
        """Return an argument for each parameter group."""
        return [self._value(name, index) for index in range(len(self.optimizer.param_groups))]

    def _own_lrs(self) -> list[float]:
        groups = self.optimizer.param_groups
        return [float(group.setdefault("initial_lr", float(group["lr"]))) for group in groups]

    def _apply(self, step: int) -> None:
        self.last_epoch = step
        self.base_lrs = [*self._own_lrs()]
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
    """Whether a parameter group has a momentum that a schedule can set."""
    return bool(group.get("betas")) or "momentum" in group


def _put(held: Any, value: float) -> Any:
    """Return what takes the place of a group's value."""
    # A tensor is filled in place: compiled and graph-captured steps read that very tensor.
    return held.fill_(value) if isinstance(held, torch.Tensor) else value


def _integer(value: Any, name: str, least: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least:
        raise ConfigError(f"{name}: expected an integer >= {least}, found {value!r}")
    return number
