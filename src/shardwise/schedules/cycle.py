"""Learning-rate range test, and one cycle of learning rate and momentum with subsequent decay.

The test finds the largest rate without divergence (Smith, "Cyclical Learning Rates for Training Neural Networks",
2017). The cycle uses this rate (Smith, "A disciplined approach to neural network hyper-parameters: Part 1", 2018).
The functions are pure in `k`, the number of earlier updates; the classes only scale them.
"""

from __future__ import annotations

import logging

import torch

from shardwise.config.argument_models import called
from shardwise.config.schema import schedules as schema
from shardwise.schedules.base import ARGUMENT, Rates, StepSchedule

_log = logging.getLogger("shardwise")

MOST_MOMENTUM = 0.999  # Maximum momentum of the decay phase, because with a momentum of 1 an optimizer never forgets.


def lr_range_test(step: int, step_size: int, step_rate: float, staircase: bool = False) -> float:
    """Return the rate of step k as a multiple of the lowest rate: 1 + step_rate k / step_size.

    With `staircase`, the multiple grows once every `step_size` steps only.

    >>> [lr_range_test(k, 2, 1.0) for k in range(5)]
    [1.0, 1.5, 2.0, 2.5, 3.0]
    >>> [lr_range_test(k, 2, 1.0, staircase=True) for k in range(5)]
    [1.0, 1.0, 2.0, 2.0, 3.0]
    """
    return 1.0 + step_rate * (step // step_size if staircase else step / step_size)


def one_cycle(
    step: int,
    first_step_size: int,
    second_step_size: int | None = None,
    first_stair_count: int = 0,
    second_stair_count: int | None = None,
) -> float:
    """Return the position between the cycle's minimum (0) and maximum (1) in step k.

    The position rises from 0 in step 0 to 1 in step F = first_step_size, falls to 0 in step F + second_step_size, and
    stays there. With n stairs the position in a half is floor(n x) / n instead of x; 0: a straight line.
    None: the falling half is as the rising one; a second_step_size of 0 leaves it out.

    >>> [one_cycle(k, 4, 2) for k in range(8)]
    [0.0, 0.25, 0.5, 0.75, 1.0, 0.5, 0.0, 0.0]
    >>> [one_cycle(k, 4, 4, first_stair_count=2) for k in range(9)]
    [0.0, 0.0, 0.5, 0.5, 1.0, 0.5, 0.5, 0.0, 0.0]
    """
    second = first_step_size if second_step_size is None else second_step_size
    if step < first_step_size:
        return _part(step, first_step_size, first_stair_count)
    if step < first_step_size + second:
        stairs = first_stair_count if second_stair_count is None else second_stair_count
        return _part(first_step_size + second - step, second, stairs)
    return 0.0


def _part(done: int, length: int, stairs: int) -> float:
    return done * stairs // length / stairs if stairs else done / length


def one_cycle_decay(step: int, cycle_size: int, decay_step_size: int, decay_rate: float) -> float:
    """Return the decay factor of step k after the cycle, which divides the rate and multiplies the momentum.

    The factor is 1 up to the end of the cycle, then 1 + decay_rate (k - cycle_size) / decay_step_size. A
    decay_step_size of 0 means no decay.

    >>> [one_cycle_decay(k, 2, 4, 1.0) for k in range(7)]
    [1.0, 1.0, 1.0, 1.25, 1.5, 1.75, 2.0]
    """
    if not decay_step_size:
        return 1.0
    return 1.0 + decay_rate * max(0, step - cycle_size) / decay_step_size


class LRRangeTest(StepSchedule):
    """Learning-rate range test: a growing rate, to find the rate at which training diverges.

    Plot the loss over the rate: a good `cycle_max_lr` is slightly below the rate at which the loss starts to rise.

    Args:
        optimizer: its groups receive the rates.
        lr_range_test_min_lr: rate of step 0, one for all groups or one each.
        lr_range_test_step_size: steps in which the rate grows by `lr_range_test_step_rate` times the first rate.
        lr_range_test_step_rate: growth as a multiple of the first rate.
        lr_range_test_staircase: grow once every `lr_range_test_step_size` steps only.
        last_batch_iteration: number of the last finished step; -1 before the first.

    Raises:
        ConfigError: a value is invalid, or a list has not one value for each group.

    >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    >>> schedule = LRRangeTest(optimizer, lr_range_test_min_lr=0.01, lr_range_test_step_size=10)
    >>> [round(schedule.lr(k)[0], 3) for k in (0, 5, 10, 20)]
    [0.01, 0.015, 0.02, 0.03]
    """

    _after = 1
    _given: schema.LRRangeTestArguments

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        lr_range_test_min_lr: Rates = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        self._given = called(schema.LRRangeTestArguments, locals(), ARGUMENT)
        super().__init__(optimizer, last_batch_iteration)

    @property
    def min_lr(self) -> list[float]:
        """Each group's rate in step 0."""
        return self._values("lr_range_test_min_lr")

    def group_lr(self, step: int, index: int, own_lr: float) -> float:
        """Return the lowest rate times the multiple of the step; the group's own rate has no effect."""
        given = self._given
        multiple = lr_range_test(
            step, given.lr_range_test_step_size, given.lr_range_test_step_rate, given.lr_range_test_staircase
        )
        return self._value("lr_range_test_min_lr", index) * multiple


class OneCycle(StepSchedule):
    """One cycle from a low rate to a high rate and back, with opposite momentum, then decay.

    The momentum is `betas[0]` of Adam-like and `momentum` of SGD-like optimizers. A group built with neither, or with a
    `momentum` of 0, has no momentum to cycle, with a warning. Rates and momenta are one for all groups or one each.

    Args:
        optimizer: its groups receive the rates and momenta.
        cycle_min_lr: rate of step 0 and of the end of the cycle.
        cycle_max_lr: rate in the middle of the cycle.
        decay_lr_rate: t steps after the cycle the rate is `cycle_min_lr` / (1 + decay_lr_rate t / decay_step_size).
        cycle_first_step_size: steps from the lowest rate to the highest.
        cycle_second_step_size: steps back to the lowest; None: as many; 0: lowest directly after the rise.
        cycle_first_stair_count: stairs of the rise; 0: a straight line.
        cycle_second_stair_count: stairs of the fall; None: as many as in the rise.
        decay_step_size: as in `decay_lr_rate`; 0: no decay.
        cycle_momentum: also cycle the momentum.
        cycle_min_mom: momentum in the middle of the cycle.
        cycle_max_mom: momentum of step 0 and of the end of the cycle.
        decay_mom_rate: t steps after the cycle the momentum is `cycle_max_mom` x (1 + decay_mom_rate t /
            decay_step_size), up to 0.999.
        last_batch_iteration: number of the last finished step; -1 before the first.

    Raises:
        ConfigError: a value is invalid, a minimum is above its maximum, or a list has not one value for each group.

    >>> optimizer = torch.optim.AdamW([torch.zeros(1)], lr=0.1)
    >>> schedule = OneCycle(optimizer, cycle_min_lr=0.0, cycle_max_lr=0.4, cycle_first_step_size=4)
    >>> [schedule.lr(k)[0] for k in (0, 2, 4, 6, 8)]
    [0.0, 0.2, 0.4, 0.2, 0.0]
    >>> schedule.step(3)
    >>> optimizer.param_groups[0]["betas"]
    (0.8, 0.999)
    """

    _after = 1
    _given: schema.OneCycleArguments

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        cycle_min_lr: Rates,
        cycle_max_lr: Rates,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: Rates = 0.8,
        cycle_max_mom: Rates = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        self._given = called(schema.OneCycleArguments, locals(), ARGUMENT)
        groups = optimizer.param_groups
        # Decided once, because the cycle may reach a momentum of 0.
        self._without = {i for i, group in enumerate(groups) if not (group.get("betas") or group.get("momentum"))}
        if self._given.cycle_momentum and self._without:
            _log.warning(
                "scheduler.params.cycle_momentum: %s has neither `betas` nor a `momentum` above 0%s, so there is no "
                "momentum to cycle; only the learning rate is. Set it to false",
                type(optimizer).__name__,
                " in some parameter groups" if len(self._without) < len(groups) else "",
            )
        if not self._given.decay_step_size and (self._given.decay_lr_rate or self._given.decay_mom_rate):
            _log.warning(
                "scheduler.params.decay_step_size: 0 means that nothing decays after the cycle, so decay_lr_rate and "
                "decay_mom_rate have no effect"
            )
        super().__init__(optimizer, last_batch_iteration)

    @property
    def min_lrs(self) -> list[float]:
        """Each group's lowest rate."""
        return self._values("cycle_min_lr")

    @property
    def max_lrs(self) -> list[float]:
        """Each group's highest rate."""
        return self._values("cycle_max_lr")

    def fraction(self, step: int) -> float:
        """Return the position between minimum (0) and maximum (1) in a step."""
        given = self._given
        return one_cycle(
            step,
            given.cycle_first_step_size,
            given.cycle_second_step_size,
            given.cycle_first_stair_count,
            given.cycle_second_stair_count,
        )

    def group_lr(self, step: int, index: int, own_lr: float) -> float:
        """Return the rate of the cycle or of the decay; the group's own rate has no effect."""
        least, most = self._value("cycle_min_lr", index), self._value("cycle_max_lr", index)
        return _between(least, most, self.fraction(step)) / self._decay(step, self._given.decay_lr_rate)

    def get_mom(self) -> list[float | None] | None:
        """Return each group's current momentum, recomputed (None for groups without); None if not cycled."""
        return self.momentum(self.last_epoch) if self._given.cycle_momentum else None

    def group_momentum(self, step: int, index: int) -> float | None:
        """Return the momentum of the cycle or of the decay; None if not cycled."""
        if not self._given.cycle_momentum or index in self._without:
            return None
        least, most = self._value("cycle_min_mom", index), self._value("cycle_max_mom", index)
        grown = _between(most, least, self.fraction(step)) * self._decay(step, self._given.decay_mom_rate)
        return min(grown, max(most, MOST_MOMENTUM))

    def _decay(self, step: int, rate: float) -> float:
        first, second = self._given.cycle_first_step_size, self._given.cycle_second_step_size
        return one_cycle_decay(step, first + (first if second is None else second), self._given.decay_step_size, rate)


def _between(start: float, stop: float, fraction: float) -> float:
    return (1.0 - fraction) * start + fraction * stop
