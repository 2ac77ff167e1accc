"""The rate that update k really uses is lr(k): from construction on, after resuming, for every group."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import CheckpointError, ConfigError
from shardwise.schedules import (
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    warmup,
    warmup_cosine,
    warmup_decay,
)

LENGTHS = st.integers(1, 40)
TYPES = st.sampled_from(["log", "linear"])


def optimizer_of(*rates: float) -> torch.optim.Optimizer:
    groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": rate} for rate in rates]
    return torch.optim.SGD(groups, lr=1.0)


@given(length=LENGTHS)
def test_linear_warmup_closed_form(length: int) -> None:
    n = max(2, length)
    assert [warmup(k, length, "linear") for k in range(n + 3)] == [min(1.0, k / n) for k in range(n + 3)]


@given(length=LENGTHS)
def test_log_warmup_closed_form(length: int) -> None:
    n = max(2, length)
    for k in range(n):
        # n to this power is k + 1: the definition, without a quotient of logarithms
        assert n ** warmup(k, length, "log") == pytest.approx(k + 1, rel=1e-12)
    assert [warmup(k, length, "log") for k in (0, n - 1, n, n + 50)] == [0.0, 1.0, 1.0, 1.0]


@given(length=LENGTHS, total=st.integers(1, 80), kind=TYPES)
def test_decay_is_a_straight_line_to_zero(length: int, total: int, kind: str) -> None:
    n = max(2, length)
    values = [warmup_decay(k, length, total, kind) for k in range(total + n + 3)]
    assert values[:n] == [warmup(k, length, kind) for k in range(n)]
    assert all(value == 0.0 for value in values[max(n, total) :])
    if total > n:
        assert values[n] == 1.0
        drops = [a - b for a, b in zip(values[n:total], values[n + 1 : total + 1], strict=True)]
        assert drops == pytest.approx([1 / (total - n)] * (total - n))


@given(length=LENGTHS, total=st.integers(1, 80), kind=TYPES, start=st.floats(0, 1), end=st.floats(0, 1))
def test_cosine(length: int, total: int, kind: str, start: float, end: float) -> None:
    n = max(2, length)
    values = [warmup_cosine(k, length, total, start, end, kind) for k in range(total + n + 3)]
    assert values[0] == start
    assert values[:n] == pytest.approx([start + (1 - start) * warmup(k, length, kind) for k in range(n)])
    decay = max(1, total - n)
    for k in range(n, total + n + 3):
        # half angle: (1 + cos(pi r)) / 2 is cos(pi r / 2) squared
        part = math.cos(math.pi * min(1.0, (k - n + 1) / decay) / 2) ** 2
        assert values[k] == pytest.approx(end * (1 - part) + part, abs=1e-12)
    assert values[-1] == pytest.approx(end)


def test_groups_have_their_own_rates() -> None:
    schedule = WarmupLR(optimizer_of(0.5, 0.25), warmup_num_steps=4, warmup_type="linear")
    assert schedule.lr(2) == [0.25, 0.125]
    assert schedule.lr(4) == [0.5, 0.25]
    schedule = WarmupLR(optimizer_of(0.5, 0.25), [0.1, 0.0], [0.3, 4.0], 4, "linear")
    assert schedule.lr(2) == pytest.approx([0.2, 2.0])
    assert schedule.get_last_lr() == [0.1, 0.0]
    decay = WarmupDecayLR(optimizer_of(0.5, 0.25), 8, [0.1, 0.0], [0.3, 4.0], 4, "linear")
    assert decay.lr(6) == pytest.approx([0.2, 2.0])
    assert decay.lr(8) == pytest.approx([0.1, 0.0])
    cosine = WarmupCosineLR(optimizer_of(0.5, 0.25), 8, 0.5, 4, 0.0, "linear")
    assert cosine.lr(2) == pytest.approx([0.375, 0.1875])


def test_a_tensor_rate_is_filled_in_place() -> None:
    rate = torch.tensor(0.5)
    optimizer = torch.optim.AdamW([torch.zeros(1)], lr=rate, capturable=False, foreach=False)
    schedule = WarmupLR(optimizer, warmup_num_steps=4, warmup_type="linear")
    schedule.step()
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.125
    assert schedule.lr(4) == [0.5]


def test_step_to_a_given_iteration() -> None:
    schedule = WarmupLR(optimizer_of(0.5), warmup_num_steps=4, warmup_type="linear")
    schedule.step(3)
    assert schedule.get_last_lr() == [0.375]
    schedule.step()
    assert schedule.state_dict() == {"last_batch_iteration": 4}
    for wrong in (-1, 1.5, "3"):
        with pytest.raises(ConfigError, match="last_batch_iteration: expected an integer >= 0"):
            schedule.step(wrong)  # type: ignore[arg-type]


def test_what_a_schedule_is_made_of_can_be_read() -> None:
    plain = WarmupLR(optimizer_of(0.5), warmup_min_lr=0.1, warmup_num_steps=1)
    assert (plain.min_lrs, plain.max_lrs, plain.warmup_num_steps, plain.warmup_type) == ([0.1], [0.5], 2, "log")
    assert WarmupLR(optimizer_of(0.5), warmup_max_lr=[0.3]).max_lrs == [0.3]
    decay = WarmupDecayLR(optimizer_of(0.5), 20, warmup_num_steps=4, warmup_type="linear")
    assert (decay.total_num_steps, decay.warmup_num_steps, decay.warmup_type) == (20, 4, "linear")
    cosine = WarmupCosineLR(optimizer_of(0.5), 2000, 0.1, cos_min_ratio=0.2)
    assert (cosine.total_num_steps, cosine.warmup_num_steps, cosine.warmup_type) == (2000, 1000, "log")
    assert (cosine.warmup_min_ratio, cosine.cos_min_ratio, cosine.get_lr_ratio()) == (0.1, 0.2, 0.1)
    cosine.step(1999)
    assert cosine.get_last_lr() == [0.5 * cosine.get_lr_ratio()] == [pytest.approx(0.1)]


def test_a_loaded_optimizer_does_not_replace_the_own_rates() -> None:
    saved, resumed = optimizer_of(0.5), optimizer_of(0.25)
    first, second = (WarmupCosineLR(each, 20, warmup_num_steps=4, warmup_type="linear") for each in (saved, resumed))
    first.step(3)
    resumed.load_state_dict(saved.state_dict())
    second.load_state_dict(first.state_dict())
    assert (first.get_last_lr(), second.get_last_lr(), second.base_lrs) == ([0.375], [0.1875], [0.25])
    assert resumed.param_groups[0]["initial_lr"] == 0.25


def test_it_is_a_torch_scheduler() -> None:
    schedule = WarmupLR(optimizer_of(0.5), warmup_num_steps=4, warmup_type="linear")
    assert isinstance(schedule, torch.optim.lr_scheduler.LRScheduler)
    assert schedule.base_lrs == [0.5]
    assert schedule.last_epoch == 0
    tail = torch.optim.lr_scheduler.ConstantLR(schedule.optimizer, factor=0.5)
    both = torch.optim.lr_scheduler.SequentialLR(schedule.optimizer, [schedule, tail], milestones=[2])
    rates = []
    for _ in range(4):
        rates.append(schedule.optimizer.param_groups[0]["lr"])
        schedule.optimizer.step()
        both.step()
    assert rates == [0.0, 0.125, 0.25, 0.25]


@pytest.mark.parametrize("few", [0, 1])
def test_a_warm_up_of_no_steps_counts_as_two(few: int) -> None:
    """Trainers fill in 0 where none is asked for."""
    for cls, params in (
        (WarmupLR, {}),
        (WarmupDecayLR, {"total_num_steps": 5}),
        (WarmupCosineLR, {"total_num_steps": 5}),
    ):
        short, two = (cls(optimizer_of(0.5), warmup_num_steps=steps, **params) for steps in (few, 2))
        assert [short.lr(step) for step in range(7)] == [two.lr(step) for step in range(7)]
    WarmupDecayLR(optimizer_of(0.5), 0)  # the Trainer sends 0 where it only evaluates


@pytest.mark.parametrize("state", [{}, {"last_batch_iteration": -1}, {"last_batch_iteration": "3"}])
def test_damaged_state_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="last_batch_iteration"):
        WarmupLR(optimizer_of(0.5)).load_state_dict(state)
