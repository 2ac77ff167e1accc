"""The simulator gives the idle time and the memory that papers publish for each schedule.

F, B, I and W are the times of a stage's forward, full backward, input gradient and weight gradient; p is the number of
ranks, m of micro-batches. With two stages on each rank a micro-batch takes 6 time units of a rank, else 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shardwise.pipeline import Action, Op, Schedule, Times, make_schedule, simulate

F, B, INPUT, WEIGHT = Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT
RANKS = (2, 3, 4, 7, 8)


def sizes(p: int) -> Iterator[int]:
    yield from sorted({p, p + 1, 2 * p, 3 * p + 1, 4 * p})


def interleaved(chunks: int, p: int, m: int) -> int:
    """Activations of whole groups of p micro-batches."""
    return min(m * chunks, 2 * (p - 1) + (chunks - 1) * p + 1)


TIMES = Times(forward=2, backward=5)
CLOSED: dict[str, tuple[dict[str, Any], Times, Callable[[int, int], Any], Callable[[int, int], Any]]] = {
    "naive, any": ({}, TIMES, lambda p, m: (p - 1) * m * 7, lambda p, m: 1),
    "gpipe, arXiv 1811.06965": ({}, TIMES, lambda p, m: (p - 1) * 7, lambda p, m: m),
    "1f1b, arXiv 2006.09503": ({}, TIMES, lambda p, m: (p - 1) * 7, lambda p, m: p),
    **{
        f"interleaved, arXiv 2104.04473, {v}": (
            {"chunks": v},
            TIMES,
            lambda p, m: (p - 1) * 7 if m % p == 0 else None,
            lambda p, m, v=v: interleaved(v, p, m) if m % p == 0 else None,
        )
        for v in (2, 4)
    },
    "zb-h1, arXiv 2401.10241": ({}, Times(), lambda p, m: p - 1, lambda p, m: p),
    "zbv, arXiv 2401.10241": ({}, Times(), lambda p, m: p - 1, lambda p, m: 2 * p),
    "v-half, arXiv 2405.15362": (
        {},
        Times(),
        lambda p, m: [0, 0, 3, 5, 8, 11, 14, 17, 20][p],
        lambda p, m: range(2 * ((p + 2) // 2) + 1),
    ),
    "v-min, arXiv 2405.15362": ({}, Times(), lambda p, m: range(4 * p + 1), lambda p, m: range(2 * ((p + 4) // 3) + 1)),
    "dualpipe-v, arXiv 2412.19437": (
        {},
        Times(),
        lambda p, m: p - 1 if m >= 2 * p else None,
        lambda p, m: 2 * p + 1 if m >= 2 * p else range(2 * p + 2),
    ),
    "inference, any": ({"chunks": 2}, Times(), lambda p, m: p - 1, lambda p, m: 1),
}
"""Idle time of the busiest rank, and the most activations of a rank, by ranks and micro-batches; a range: at most."""


@pytest.mark.parametrize("kind", CLOSED)
def test_idle_time_and_activations_are_those_that_papers_publish(kind: str) -> None:
    more, times, idle, peak = CLOSED[kind]
    for p in RANKS:
        for m in sizes(p):
            result = simulate(make_schedule(kind.partition(",")[0], p, m, **more), times)
            for found, expected in ((result.makespan - max(result.busy), idle(p, m)), (max(result.peak), peak(p, m))):
                within = expected is None or (found in expected if isinstance(expected, range) else found == expected)
                assert within, (p, m, found, expected)


def test_no_zbv_rank_waits_between_its_actions_and_1f1b_holds_less_on_later_ranks() -> None:
    for p in RANKS:
        assert simulate(make_schedule("zbv", p, 2 * p)).gaps == (0,) * p
        assert simulate(make_schedule("1f1b", p, 2 * p)).peak == tuple(p - rank for rank in range(p))
        whole = simulate(make_schedule("1f1b", p, 2 * p + 1), Times(forward=4, backward=10))
        assert simulate(make_schedule("interleaved", p, 2 * p + 1, 2), TIMES).makespan <= whole.makespan


def test_of_schedules_with_equal_memory_later_ones_idle_less() -> None:
    results = [simulate(make_schedule(name, 4, 8)) for name in ("gpipe", "1f1b", "zb-h1")]
    shares = [result.idle_share for result in results]
    shares += [simulate(make_schedule("zbv", 4, 8)).idle_share]
    assert shares == pytest.approx([9 / 33, 9 / 33, 3 / 27, 3 / 51])


def test_a_message_delays_the_next_stage_and_no_computation() -> None:
    result = simulate(make_schedule("1f1b", 2, 1), Times(forward=(1, 2), backward=(3, 4), message=0.5))
    times = [(str(span.action.op.name), span.start, span.end) for spans in result.spans for span in spans]
    assert times == [
        ("FORWARD", 0, 1),
        ("BACKWARD", 8, 11),
        ("FORWARD", 1.5, 3.5),
        ("BACKWARD", 3.5, 7.5),
    ]
    assert result.makespan == 11
    assert result.busy == (4, 6)
    assert result.idle == pytest.approx((7 / 11, 5 / 11))
    assert result.gaps == (7, 0)
    assert simulate(make_schedule("gpipe", 2, 3), Times(message=100)).spans[0][2].end == 3


def test_the_backward_takes_the_time_of_both_gradients_by_default() -> None:
    schedule = make_schedule("1f1b", 1, 1)
    assert simulate(schedule, Times(forward=1, input_gradient=(2,), weight_gradient=4)).makespan == 7
    assert simulate(schedule, Times(forward=1, input_gradient=(2,), weight_gradient=4, backward=5)).makespan == 6


def test_activations_are_held_until_the_gradient_that_needs_them() -> None:
    order = (Action(F, 0, 0), Action(INPUT, 0, 0), Action(F, 0, 1), Action(INPUT, 0, 1))
    weights = (Action(WEIGHT, 0, 0), Action(WEIGHT, 0, 1))
    schedule = Schedule("delayed", 1, 1, 2, (0,), (order + weights,))
    assert simulate(schedule).peak == (2,)
    assert simulate(schedule, kept=0.25).peak == (1.25,)
    assert simulate(schedule, activations=(100,), kept=0.5).peak == (150,)
    assert simulate(make_schedule("gpipe", 2, 3), activations=(10, 7)).peak == (30, 21)
    assert simulate(make_schedule("inference", 2, 3, 2), activations=(10, 7, 20, 1)).peak == (20, 7)
