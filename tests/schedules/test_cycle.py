"""LRRangeTest and OneCycle: the formulas, momentum beside the rate, and what is refused."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import ConfigError
from shardwise.schedules import LRRangeTest, OneCycle, lr_range_test, one_cycle, one_cycle_decay

LENGTHS = st.integers(1, 40)
STAIRS = st.integers(0, 50)


def groups_of(count: int) -> list[dict[str, Any]]:
    return [{"params": [torch.zeros(1, requires_grad=True)]} for _ in range(count)]


def adam(count: int = 1) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups_of(count), lr=7.0, betas=(0.5, 0.99))


@given(size=LENGTHS, rate=st.floats(0, 10), step=st.integers(0, 200))
def test_range_test_closed_form(size: int, rate: float, step: int) -> None:
    here = lr_range_test(step, size, rate)
    assert here == pytest.approx(1 + rate * step / size)
    stair = lr_range_test(step, size, rate, staircase=True)
    assert stair <= here
    assert stair == lr_range_test(step - step % size, size, rate)
    schedule = LRRangeTest(adam(2), [0.5, 0.25], size, rate)
    assert schedule.lr(step) == [0.5 * here, 0.25 * here]
    assert schedule.momentum(step) == [None, None]


@given(first=LENGTHS, second=st.none() | LENGTHS, up=STAIRS, down=st.none() | STAIRS)
def test_cycle_closed_form(first: int, second: int | None, up: int, down: int | None) -> None:
    fall = first if second is None else second
    values = [one_cycle(k, first, second, up, down) for k in range(first + fall + 5)]
    assert values[0] == 0.0
    assert values[first] == 1.0
    assert values[first + fall :] == [0.0] * 5
    for k, value in enumerate(values[: first + fall]):
        rising = k < first
        line, stairs = (k / first, up) if rising else (1 - (k - first) / fall, up if down is None else down)
        if stairs:
            # Whole stairs, not above the straight line and less than one stair below it, as in DeepSpeed 0.19.8.
            assert value * stairs == pytest.approx(round(value * stairs), abs=1e-9)
            assert -1e-9 <= line - value < 1 / stairs
        else:
            assert value == pytest.approx(line)


def test_stairs_are_those_of_deepspeed() -> None:
    values = [one_cycle(k, 6, 5, 3, 2) for k in range(12)]
    assert values == pytest.approx([0, 0, 1 / 3, 1 / 3, 2 / 3, 2 / 3, 1, 0.5, 0.5, 0, 0, 0])


@given(size=LENGTHS, every=st.integers(0, 20), rate=st.floats(0, 10), step=st.integers(0, 200))
def test_decay_closed_form(size: int, every: int, rate: float, step: int) -> None:
    expected = 1 + rate * (step - size) / every if every and step > size else 1
    assert one_cycle_decay(step, size, every, rate) == pytest.approx(expected)


def test_rate_and_momentum_through_cycle_and_decay() -> None:
    params = {"cycle_first_step_size": 2, "cycle_second_step_size": 4, "decay_step_size": 2}
    optimizer = adam(2)
    schedule = OneCycle(
        optimizer,
        [0.1, 0.2],
        [0.5, 0.2],
        1.0,
        cycle_min_mom=0.6,
        cycle_max_mom=[0.8, 0.6],
        decay_mom_rate=0.5,
        **params,
    )
    used = []
    for _ in range(9):
        used.append([(group["lr"], *group["betas"]) for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    assert used == [list(zip(schedule.lr(k), schedule.momentum(k), (0.99, 0.99), strict=True)) for k in range(9)]
    first = [row[0] for row in used]
    assert [rate for rate, _, _ in first] == pytest.approx([0.1, 0.3, 0.5, 0.4, 0.3, 0.2, 0.1, 0.1 / 1.5, 0.05])
    assert [mom for _, mom, _ in first] == pytest.approx([0.8, 0.7, 0.6, 0.65, 0.7, 0.75, 0.8, 0.999, 0.999])
    second = [row[1] for row in used]
    assert [rate for rate, _, _ in second] == pytest.approx([0.2] * 7 + [0.2 / 1.5, 0.1])
    assert [mom for _, mom, _ in second] == pytest.approx([0.6] * 7 + [0.75, 0.9])


def test_momentum_of_sgd_and_of_tensors() -> None:
    sgd = torch.optim.SGD(groups_of(1), lr=1.0, momentum=0.3, nesterov=True)
    schedule = OneCycle(sgd, 0.0, 1.0, cycle_first_step_size=2)
    seen = []
    for _ in range(3):
        seen.append(sgd.param_groups[0]["momentum"])
        schedule.step()
    assert seen == pytest.approx([0.9, 0.85, 0.8])
    schedule = OneCycle(sgd, 0.0, 1.0, cycle_first_step_size=1, cycle_min_mom=0.0)
    seen = []
    for _ in range(3):
        seen.append(sgd.param_groups[0]["momentum"])
        schedule.step()
    assert seen == pytest.approx([0.9, 0.0, 0.9])
    beta, rate = torch.tensor(0.5), torch.tensor(1.0)
    tensors = torch.optim.AdamW(groups_of(1), lr=rate, betas=(beta, torch.tensor(0.99)), foreach=False)
    schedule = OneCycle(tensors, 0.0, 1.0, cycle_first_step_size=2)
    schedule.step()
    assert tensors.param_groups[0]["betas"][0] is beta and tensors.param_groups[0]["lr"] is rate
    assert (beta.item(), rate.item()) == pytest.approx((0.85, 0.5))


@pytest.mark.parametrize(
    "optimizer",
    [torch.optim.Adagrad, torch.optim.Adafactor, torch.optim.Rprop, torch.optim.SGD, torch.optim.RMSprop],
)
def test_an_optimizer_without_momentum_keeps_its_settings(
    optimizer: type[torch.optim.Optimizer], caplog: pytest.LogCaptureFixture
) -> None:
    made = optimizer(groups_of(1))
    before = {key: value for key, value in made.param_groups[0].items() if key != "lr"}
    with caplog.at_level(logging.WARNING, "shardwise"):
        schedule = OneCycle(made, 0.1, 0.5, cycle_first_step_size=2)
    assert f"cycle_momentum: {optimizer.__name__} has neither `betas` nor a `momentum` above 0" in caplog.text
    schedule.step(1)
    group = dict(made.param_groups[0])
    assert group.pop("lr") == 0.5
    assert group.pop("initial_lr") is not None
    assert group == before
    assert schedule.momentum(2) == [None]


def test_switched_off_momentum_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = adam()
    with caplog.at_level(logging.WARNING, "shardwise"):
        OneCycle(optimizer, 0.1, 0.5, cycle_momentum=False).step(2000)
        OneCycle(torch.optim.Adagrad(groups_of(1)), 0.1, 0.5, cycle_momentum=False)
    assert optimizer.param_groups[0]["betas"] == (0.5, 0.99)
    assert not caplog.records
    with caplog.at_level(logging.WARNING, "shardwise"):
        OneCycle(optimizer, 0.1, 0.5, decay_lr_rate=0.5)
    assert "decay_step_size: 0 means that nothing decays" in caplog.text


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"cycle_min_lr": [0.1, 0.6]}, "cycle_min_lr"),
        ({"cycle_max_lr": [0.5] * 3}, "cycle_max_lr"),
        ({"cycle_max_mom": 1.0}, "cycle_max_mom"),
        ({"last_batch_iteration": -2}, "last_batch_iteration"),
    ],
)
def test_cycles_without_meaning(params: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^scheduler\.params\.{name}: "):
        OneCycle(adam(2), **{"cycle_min_lr": 0.1, "cycle_max_lr": 0.5, **params})


def test_step_to_a_given_index_names_the_last_finished_step() -> None:
    """As the constructors' argument does, and as the API has it: the rate of index k has (k + 1) in it."""
    optimizer = torch.optim.SGD(groups_of(1), lr=0.1)
    test = LRRangeTest(optimizer)
    test.step(1)
    assert test.get_last_lr() == pytest.approx([0.001001]) == LRRangeTest(optimizer, last_batch_iteration=1).lr(2)
    optimizer = torch.optim.SGD(groups_of(1), lr=0.1, momentum=0.9)
    cycle = OneCycle(optimizer, 0.01, 0.1, cycle_first_step_size=10)
    cycle.step(1)
    assert cycle.get_last_lr() == pytest.approx([0.028])
    cycle.step()
    assert cycle.get_last_lr() == cycle.lr(3)


def test_what_a_cycle_is_made_of_can_be_read() -> None:
    cycle = OneCycle(adam(2), [0.01, 0.02], 0.1, cycle_first_step_size=10)
    assert cycle.min_lrs == [0.01, 0.02] and cycle.max_lrs == [0.1, 0.1]
    cycle.step(9)
    assert cycle.get_mom() == pytest.approx([0.8, 0.8])
    assert OneCycle(adam(), 0.01, 0.1, cycle_momentum=False).get_mom() is None
    assert LRRangeTest(adam(2), 0.01).min_lr == [0.01, 0.01]
