"""The simulator gives the idle time and the memory that papers publish for each schedule.

F, B, I and W are the times of a stage's forward, full backward, input gradient and weight gradient; p is the number of
ranks, m of micro-batches. With two stages on each rank a micro-batch takes 6 time units of a rank, else 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import MagicMock

import pytest
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.stage import _PipelineStageBase

from shardwise.pipeline import Action, Op, Schedule, Simulation, Times, make_schedule, placement_of, simulate, validate

F, B, INPUT, WEIGHT = Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT
RANKS = range(2, 9)


def idle_times(result: Simulation) -> list[float]:
    return [result.makespan - busy for busy in result.busy]


def sizes(p: int) -> Iterator[int]:
    yield from sorted({*range(p, 4 * p + 1, 3), 2 * p, 3 * p, 4 * p})


@pytest.mark.parametrize("p", RANKS)
def test_naive_model_parallelism_leaves_all_ranks_but_one_idle(p: int) -> None:
    for m in sizes(p):
        result = simulate(make_schedule("naive", p, m), Times(forward=2, input_gradient=3, weight_gradient=1))
        assert result.idle == pytest.approx([(p - 1) / p] * p)
        assert result.idle_share == pytest.approx((p - 1) / p)
        assert result.peak == (1,) * p


@pytest.mark.parametrize("p", RANKS)
def test_gpipe(p: int) -> None:
    """GPipe (arXiv 1811.06965): idle (p - 1)(F + B), activations of m micro-batches."""
    for m in sizes(p):
        result = simulate(make_schedule("gpipe", p, m), Times(forward=2, backward=5))
        assert idle_times(result) == [(p - 1) * 7] * p
        assert result.idle_share == pytest.approx((p - 1) / (m + p - 1))
        assert result.peak == (m,) * p


@pytest.mark.parametrize("p", RANKS)
def test_1f1b(p: int) -> None:
    """PipeDream-Flush (arXiv 2006.09503): idle time of GPipe, activations of p - rank micro-batches."""
    for m in sizes(p):
        result = simulate(make_schedule("1f1b", p, m), Times(forward=2, backward=5))
        assert idle_times(result) == [(p - 1) * 7] * p
        assert result.peak == tuple(min(p - rank, m) for rank in range(p))


@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize("p", RANKS)
def test_interleaved(p: int, chunks: int) -> None:
    """Interleaved 1F1B (arXiv 2104.04473): idle (p - 1)(F + B) / v for whole groups of p micro-batches.

    F and B there are those of all v stages of a rank.
    """
    for m in sizes(p):
        result = simulate(make_schedule("interleaved", p, m, chunks), Times(forward=2, backward=5))
        if m % p == 0:
            assert idle_times(result) == [(p - 1) * 7] * p
            assert max(result.peak) == min(m * chunks, 2 * (p - 1) + (chunks - 1) * p + 1)
        else:
            one = simulate(make_schedule("1f1b", p, m), Times(forward=2 * chunks, backward=5 * chunks))
            assert result.makespan <= one.makespan


@pytest.mark.parametrize("p", RANKS)
def test_zb_h1(p: int) -> None:
    """Zero Bubble (arXiv 2401.10241): idle (p - 1)(F + I - W) = (p - 1)(F + B - 2W), 1F1B's activations."""
    for m in sizes(p):
        result = simulate(make_schedule("zb-h1", p, m))
        assert idle_times(result) == [p - 1] * p
        assert max(result.peak) == max(simulate(make_schedule("1f1b", p, m)).peak) == p


@pytest.mark.parametrize("p", RANKS)
def test_zbv(p: int) -> None:
    """ZBV (arXiv 2401.10241): no idle time between a rank's actions for m >= 2p, 1F1B's activations.

    Rank p - 1 starts after p - 1 forwards, hence no schedule of these stages ends sooner.
    """
    for m in sizes(p):
        result = simulate(make_schedule("zbv", p, m))
        assert result.makespan == 6 * m + p - 1
        assert max(result.peak) == 2 * p
        if m >= 2 * p:
            assert result.gaps == (0,) * p


@pytest.mark.parametrize("p", RANKS)
def test_v_half(p: int) -> None:
    """V-Half (arXiv 2405.15362): idle p / 2 micro-batches' times, activations of (p + 2) // 2 of 1F1B's p."""
    for m in sizes(p):
        result = simulate(make_schedule("v-half", p, m))
        assert max(result.peak) <= 2 * ((p + 2) // 2)
        assert result.makespan - 6 * m <= 6 * p / 2
        assert result.makespan - 6 * m == [0, 0, 3, 5, 8, 11, 14, 17, 20][p]


@pytest.mark.parametrize("p", RANKS)
def test_v_min(p: int) -> None:
    """V-Min (arXiv 2405.15362): idle 2p / 3 micro-batches' times, activations of (p + 4) // 3 of 1F1B's p."""
    for m in sizes(p):
        result = simulate(make_schedule("v-min", p, m))
        assert max(result.peak) <= 2 * ((p + 4) // 3)
        assert result.makespan - 6 * m <= 6 * 2 * p / 3


@pytest.mark.parametrize("p", RANKS)
def test_dualpipe_v(p: int) -> None:
    """DualPipe cut in half (arXiv 2412.19437): idle at most (p - 1)(F&B + B - 3W), 2p + 1 stages' activations.

    F&B is the time of a forward and a backward that overlap; here F + B, because the simulation does not overlap them.
    """
    for m in sizes(p):
        result = simulate(make_schedule("dualpipe-v", p, m))
        assert max(result.peak) <= 2 * p + 1
        if m >= 2 * p:
            assert idle_times(result) == [p - 1] * p
            assert max(idle_times(result)) <= (p - 1) * (3 + 2 - 3)
            assert max(result.peak) == 2 * p + 1


@pytest.mark.parametrize("p", RANKS)
def test_inference(p: int) -> None:
    for m in sizes(p):
        for chunks in (1, 2, 3):
            result = simulate(make_schedule("inference", p, m, chunks))
            assert result.makespan == m * chunks + p - 1
            assert result.peak == (1,) * p


def test_of_schedules_with_equal_memory_later_ones_idle_less() -> None:
    results = [simulate(make_schedule(name, 4, 8)) for name in ("gpipe", "1f1b", "zb-h1")]
    shares = [result.idle_share for result in results]
    shares += [simulate(make_schedule("zbv", 4, 8)).idle_share]
    assert shares == pytest.approx([9 / 33, 9 / 33, 3 / 27, 3 / 51])


def of_torch(cls: type, p: int, chunks: int, m: int) -> Schedule:
    """Return the computations of a schedule of torch.distributed.pipelining."""
    stages = []
    rank_of = placement_of("zbv", p) if "V" in cls.__name__ else placement_of("gpipe", p, chunks)
    for number in (stage for stage, rank in enumerate(rank_of) if rank == 0):
        stage = MagicMock(spec=_PipelineStageBase)
        stage.stage_index, stage.num_stages, stage.group_size, stage.group_rank = number, len(rank_of), p, 0
        stage.is_first, stage.is_last = number == 0, number == len(rank_of) - 1
        stage.has_backward, stage.submod, stage.device = True, None, "cpu"
        stages.append(stage)
    made = cls(stages, m, loss_fn=lambda output, target: output)
    ops = {"FORWARD": F, "FULL_BACKWARD": B, "BACKWARD_INPUT": INPUT, "BACKWARD_WEIGHT": WEIGHT}
    orders = []
    for rank in range(p):
        single = [a for item in made.pipeline_order[rank] if item is not None for a in (item.sub_actions or (item,))]
        orders.append(tuple(Action(ops[a.computation_type.name], a.stage_index, a.microbatch_index) for a in single))
    return Schedule(cls.__name__, p, len(rank_of), m, rank_of, tuple(orders))


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize(
    ("cls", "name", "chunks"),
    [
        ("ScheduleLoopedBFS", "gpipe", 2),
        ("ScheduleInterleaved1F1B", "interleaved", 2),
        ("ScheduleInterleaved1F1B", "interleaved", 3),
        ("ScheduleZBVZeroBubble", "zbv", 2),
        ("ScheduleDualPipeV", "dualpipe-v", 2),
    ],
)
def test_torchs_schedules_have_the_same_length_and_memory(cls: str, name: str, chunks: int, p: int) -> None:
    for m in (2 * p, 3 * p):
        theirs = of_torch(getattr(torch_schedules, cls), p, chunks, m)
        validate(theirs)
        expected, found = simulate(theirs), simulate(make_schedule(name, p, m, chunks))
        assert (found.makespan, found.busy, found.peak) == (expected.makespan, expected.busy, expected.peak)


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
