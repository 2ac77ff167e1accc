"""What holds for all five schedules, whatever their arguments: bounds, no jumps, resuming, groups, monotone pieces."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.schedules import VALID_LR_SCHEDULES, StepSchedule, build

OWN = (0.5, 0.25)
LENGTHS = st.integers(1, 30)
RATES = st.floats(0, 2)


@dataclass
class Drawn:
    """A schedule by name, and what its arguments promise for each parameter group.

    Attributes:
        bounds: lowest and highest rate of each group (the range test has no highest).
        slope: how much of that range the rate moves in one step, at most; None with stairs.
        turns: steps at which the rate may turn from rising to falling or back.
    """

    name: str
    params: dict[str, Any]
    bounds: list[tuple[float, float]]
    slope: float | None
    turns: list[int]

    def build(self, optimizer: torch.optim.Optimizer) -> StepSchedule:
        schedule = build(self.name, optimizer, self.params)
        assert isinstance(schedule, StepSchedule)
        return schedule


def optimizer() -> torch.optim.Optimizer:
    groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": lr} for lr in OWN]
    return torch.optim.Adam(groups, betas=(0.6, 0.9))


def per_group(draw: st.DrawFn, values: st.SearchStrategy[float]) -> tuple[Any, list[float]]:
    """A number for all groups or a list, as it is written and for each group."""
    if draw(st.booleans()):
        value = draw(values)
        return value, [value] * len(OWN)
    listed = [draw(values) for _ in OWN]
    return listed, listed


@st.composite
def drawn(draw: st.DrawFn) -> Drawn:
    name = draw(st.sampled_from(VALID_LR_SCHEDULES))
    if name == "LRRangeTest":
        low, lows = per_group(draw, st.floats(0.01, 1))
        size, rate, stairs = draw(LENGTHS), draw(st.floats(0, 3)), draw(st.booleans())
        params = {
            "lr_range_test_min_lr": low,
            "lr_range_test_step_size": size,
            "lr_range_test_step_rate": rate,
            "lr_range_test_staircase": stairs,
        }
        return Drawn(name, params, [(value, math.inf) for value in lows], None if stairs else rate / size, [])
    if name == "OneCycle":
        low, lows = per_group(draw, RATES)
        span = draw(RATES)
        highs = [value + span for value in lows]
        first, second = draw(LENGTHS), draw(st.none() | LENGTHS)
        up, down = draw(st.integers(0, 5)), draw(st.none() | st.integers(0, 5))
        decay, every = draw(st.floats(0, 2)), draw(st.integers(0, 9))
        params = {
            "cycle_min_lr": low,
            "cycle_max_lr": highs,
            "cycle_first_step_size": first,
            "cycle_second_step_size": second,
            "cycle_first_stair_count": up,
            "cycle_second_stair_count": down,
            "decay_lr_rate": decay,
            "decay_mom_rate": draw(st.floats(0, 0.1)),
            "decay_step_size": every,
        }
        stairs = bool(up or down)
        bounds = [(0.0 if decay and every else value, high) for value, high in zip(lows, highs, strict=True)]
        slope = max(1 / first, 1 / (second or first), decay / every if every else 0)
        return Drawn(name, params, bounds, None if stairs else slope, [first])
    length, total, kind = draw(LENGTHS), draw(st.integers(1, 60)), draw(st.sampled_from(["log", "linear"]))
    n = max(2, length)
    params = {"warmup_num_steps": length, "warmup_type": kind}
    if name != "WarmupLR":
        params["total_num_steps"] = total
    slope = math.log(2) / math.log(n) if kind == "log" else 1 / n
    if name == "WarmupCosineLR":
        start, end = draw(st.floats(0, 1)), draw(st.floats(0, 1))
        params |= {"warmup_min_ratio": start, "cos_min_ratio": end}
        slope = max(slope, math.pi / 2 / (total - n)) if total > n else 1.0
        return Drawn(name, params, [(own * min(start, end), own) for own in OWN], slope, [n - 1, n])
    low, lows = per_group(draw, RATES)
    span = draw(RATES)
    highs = [value + span for value in lows]
    params |= {"warmup_min_lr": low, "warmup_max_lr": highs}
    if name == "WarmupDecayLR":
        slope = max(slope, 1 / (total - n)) if total > n else 1.0
    return Drawn(name, params, list(zip(lows, highs, strict=True)), slope, [n - 1, n])


STEPS = 80


@given(chosen=drawn())
def test_bounds_slopes_and_turns(chosen: Drawn) -> None:
    schedule = chosen.build(optimizer())
    table = [schedule.lr(k) for k in range(STEPS)]
    for group, (low, high) in enumerate(chosen.bounds):
        rates = [row[group] for row in table]
        eps = 1e-9 * max(1.0, *rates)
        assert all(low - eps <= rate <= high + eps for rate in rates)
        if chosen.slope is not None:
            reach = low if math.isinf(high) else high
            assert all(abs(there - here) <= chosen.slope * reach + eps for here, there in pairwise(rates))
        turned = [0, *chosen.turns, STEPS - 1]
        for start, stop in pairwise(turned):
            steps = [there - here for here, there in pairwise(rates[start : stop + 1])]
            assert all(step >= -eps for step in steps) or all(step <= eps for step in steps)


@given(chosen=drawn())
def test_momentum_moves_against_the_rate(chosen: Drawn) -> None:
    schedule = chosen.build(optimizer())
    for group, (low, high) in enumerate(chosen.bounds):
        momenta = [schedule.momentum(k)[group] for k in range(STEPS)]
        if chosen.name != "OneCycle":
            assert momenta == [None] * STEPS
            continue
        assert all(0.8 - 1e-9 <= momentum <= 0.999 for momentum in momenta)
        for k in range(STEPS - 1):
            rise = schedule.lr(k + 1)[group] - schedule.lr(k)[group]
            if high > low and abs(rise) > 1e-9:
                assert (momenta[k + 1] - momenta[k]) * rise <= 0


def train(schedule: StepSchedule, updates: int) -> list[list[tuple[float, Any]]]:
    """The rate and betas with which each update is made."""
    used = []
    for _ in range(updates):
        used.append([(group["lr"], group["betas"]) for group in schedule.optimizer.param_groups])
        schedule.optimizer.step()
        schedule.step()
    return used


@settings(max_examples=60)
@given(chosen=drawn(), stop=st.integers(0, 30))
def test_resuming_at_any_step_is_never_having_stopped(chosen: Drawn, stop: int) -> None:
    whole = chosen.build(optimizer())
    rates = [whole.lr(k) for k in range(41)]
    expected = train(whole, 40)
    assert [[rate for rate, _ in groups] for groups in expected] == rates[:40]
    assert whole.get_last_lr() == whole.get_lr() == rates[40]  # type: ignore[attr-defined]
    first = chosen.build(optimizer())
    assert train(first, stop) == expected[:stop]
    state = json.loads(json.dumps(first.state_dict()))
    assert state == {"last_batch_iteration": stop}
    # A new optimizer with its own settings, one that was loaded, and one that is further on.
    loaded = optimizer()
    loaded.load_state_dict(first.optimizer.state_dict())
    for second in (chosen.build(optimizer()), chosen.build(loaded), whole):
        second.load_state_dict(state)
        assert train(second, 40 - stop) == expected[stop:]
    again = optimizer()
    again.load_state_dict(first.optimizer.state_dict())
    params = {**chosen.params, "last_batch_iteration": stop - 1}
    third = build(chosen.name, again, params)
    assert isinstance(third, StepSchedule)
    assert train(third, 40 - stop) == expected[stop:]


@given(chosen=drawn(), step=st.integers(0, STEPS))
def test_each_group_is_scheduled_as_if_it_were_alone(chosen: Drawn, step: int) -> None:
    together = chosen.build(optimizer())
    for index, own in enumerate(OWN):
        params = {key: [value[index]] if isinstance(value, list) else value for key, value in chosen.params.items()}
        alone = torch.optim.Adam([torch.zeros(1, requires_grad=True)], lr=own)
        schedule = build(chosen.name, alone, params)
        assert isinstance(schedule, StepSchedule)
        assert schedule.lr(step) == together.lr(step)[index : index + 1]
        assert schedule.momentum(step) == together.momentum(step)[index : index + 1]
