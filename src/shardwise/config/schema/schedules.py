"""The section of the schedule, and the arguments of each: one model, which its constructor uses, too."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from .base import Arguments, At, ConfigSection, Contradictions, Flag, Int, NotNegative, PartOfOne, as_list, key

_OneEach = Field(min_length=1)
Rates = NotNegative | Annotated[list[NotNegative], BeforeValidator(as_list), _OneEach]
"""One rate for all parameter groups, or one for each."""
_Positive = Annotated[float, Field(gt=0)]
_PositiveRates = _Positive | Annotated[list[_Positive], BeforeValidator(as_list), _OneEach]
_Momenta = PartOfOne | Annotated[list[PartOfOne], BeforeValidator(as_list), _OneEach]


class _Schedule(Arguments):
    last_batch_iteration: Int = key(-1, "Number of the last finished step; -1 before the first.", ge=-1)


class LRRangeTestArguments(_Schedule):
    """The learning-rate range test."""

    lr_range_test_min_lr: _PositiveRates = key(1e-3, "First rate.")
    lr_range_test_step_size: Int = key(2000, "Steps in which the rate grows so much.", gt=0)
    lr_range_test_step_rate: NotNegative = key(1.0, "Growth, in multiples of the first rate.")
    lr_range_test_staircase: Flag = key(False, "Grow once every step_size steps.")


class OneCycleArguments(_Schedule):
    """One cycle of learning rate and momentum, then decay."""

    cycle_min_lr: Rates = key(..., "Lowest rate.")
    cycle_max_lr: Rates = key(..., "Highest rate.")
    decay_lr_rate: NotNegative = key(0.0, "Decay of the rate after the cycle.")
    cycle_first_step_size: Int = key(2000, "Steps up.", gt=0)
    cycle_second_step_size: Int | None = key(None, "Steps down; default: as many as up.", ge=0)
    cycle_first_stair_count: Int = key(0, "Stairs up; 0: a straight line.", ge=0)
    cycle_second_stair_count: Int | None = key(None, "Stairs down; default: as many as up.", ge=0)
    decay_step_size: Int = key(0, "Steps in which the rate decays so much; 0: no decay.", ge=0)
    cycle_momentum: Flag = key(True, "Cycle the momentum, too.")
    cycle_min_mom: _Momenta = key(0.8, "Lowest momentum.")
    cycle_max_mom: _Momenta = key(0.9, "Highest momentum.")
    decay_mom_rate: NotNegative = key(0.0, "Growth of the momentum after the cycle.")

    def contradictions(self, at: At) -> Contradictions:
        """Yield minima above their maxima."""
        yield from self.ordered("cycle_min_lr", "cycle_max_lr", at)
        yield from self.ordered("cycle_min_mom", "cycle_max_mom", at)


class Warmup(_Schedule):
    """Schedules that begin with a warm-up."""

    warmup_num_steps: Int = key(1000, "Length of the warm-up; 0 and 1 count as 2.", ge=0)
    warmup_type: Literal["log", "linear"] = key("log", "Form of the warm-up.")


class WarmupLRArguments(Warmup):
    """Warm-up, then a constant rate."""

    warmup_min_lr: Rates = key(0.0, "First rate.")
    warmup_max_lr: Rates | None = key(None, "Rate after the warm-up; default: the optimizer's.")


class WarmupDecayLRArguments(WarmupLRArguments):
    """Warm-up, then linear decay."""

    total_num_steps: Int = key(..., "Length of the schedule.", ge=0)


class WarmupCosineLRArguments(Warmup):
    """Warm-up, then cosine decay, in fractions of the optimizer's rate."""

    total_num_steps: Int = key(..., "Length of the schedule.", ge=0)
    warmup_min_ratio: NotNegative = key(0.0, "First fraction of the optimizer's rate.")
    cos_min_ratio: NotNegative = key(1e-4, "Last fraction of the optimizer's rate.")


NATIVE_SCHEDULES: dict[str, type[Arguments]] = {
    cls.called(): cls
    for cls in (
        LRRangeTestArguments,
        OneCycleArguments,
        WarmupLRArguments,
        WarmupDecayLRArguments,
        WarmupCosineLRArguments,
    )
}
"""This library's schedules, by exact name; warmup_max_lr null: the optimizer's lr."""


class Scheduler(ConfigSection):
    """`scheduler`: learning-rate schedule that the engine builds and advances once per optimizer step."""

    type: str | None = key(
        None,
        "WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest, or the exact name of a class in "
        "torch.optim.lr_scheduler.",
    )
    params: dict[str, Any] = key({}, "Arguments of the schedule.", free_form=True)
