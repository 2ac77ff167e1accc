"""Every schedule has each action once, ends for any number of micro-batches and any times, and keeps links in order."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import ConfigError
from shardwise.pipeline import (
    SCHEDULES,
    Action,
    Op,
    Schedule,
    ScheduleError,
    Times,
    make_schedule,
    placement_of,
    simulate,
    validate,
    with_communication,
    with_sharding,
)
from shardwise.pipeline.actions import COMPUTATIONS, INPUT_GRADIENT, WEIGHT_GRADIENT

F, B, INPUT, WEIGHT = Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    kind = SCHEDULES[name]
    ranks = draw(st.integers(1, 8))
    placement = draw(st.sampled_from(kind.placements))
    least, most = (2, 2) if placement == "v" else kind.chunks
    chunks = draw(st.integers(int(least), int(min(most, 3))))
    return make_schedule(name, ranks, draw(st.integers(1, 4 * ranks)), chunks, placement)


@given(schedules())
@settings(deadline=None)
def test_each_computation_occurs_once_on_the_rank_of_its_stage(schedule: Schedule) -> None:
    counts = Counter((a.op, a.stage, a.micro_batch) for a in schedule)
    assert set(counts.values()) == {1}
    trains = SCHEDULES[schedule.name].trains
    for rank, actions in enumerate(schedule.actions):
        done: set[Action] = set()
        for action in actions:
            assert schedule.rank_of[action.stage] == rank
            if action.op is WEIGHT:
                assert Action(INPUT, action.stage, action.micro_batch) in done
            done.add(action)
    for stage in range(schedule.stages):
        for n in range(schedule.micro_batches):
            found = {op for op in COMPUTATIONS if counts[op, stage, n]}
            assert found in ([{F, B}, {F, INPUT, WEIGHT}] if trains else [{F}])
    assert SCHEDULES[schedule.name].splits_weights or not schedule.has(frozenset({WEIGHT}))
    validate(schedule)


@given(schedules())
@settings(deadline=None)
def test_a_stage_takes_micro_batches_in_ascending_order(schedule: Schedule) -> None:
    """Because gradients are added in this order, all schedules give the same bits."""
    for ops in (frozenset({F}), INPUT_GRADIENT, WEIGHT_GRADIENT):
        taken = defaultdict(list)
        for action in schedule:
            if action.op in ops:
                taken[action.stage].append(action.micro_batch)
        assert all(numbers == list(range(schedule.micro_batches)) for numbers in taken.values())


@given(schedules())
@settings(deadline=None)
def test_messages_of_a_link_are_received_in_the_order_of_their_production(schedule: Schedule) -> None:
    lowered = with_communication(schedule)
    validate(lowered)
    assert tuple(tuple(a for a in acts if a.op in COMPUTATIONS) for acts in lowered.actions) == schedule.actions
    sent, received = defaultdict(list), defaultdict(list)
    for rank, actions in enumerate(lowered.actions):
        for previous, action, following in zip((None, *actions), actions, (*actions[1:], None), strict=False):
            n, stage = action.micro_batch, action.stage
            if action.op is Op.SEND_FORWARD:
                assert previous == Action(F, stage, n)
                sent["forward", rank, schedule.rank_of[stage + 1]].append((stage, n))
            elif action.op is Op.SEND_BACKWARD:
                assert previous is not None and previous.op in INPUT_GRADIENT and previous.stage == stage > 0
                sent["backward", rank, schedule.rank_of[stage - 1]].append((stage, n))
            elif action.op is Op.RECV_FORWARD:
                assert following == Action(F, stage, n)
                received["forward", schedule.rank_of[stage - 1], rank].append((stage - 1, n))
            elif action.op is Op.RECV_BACKWARD:
                assert following is not None and following.op in INPUT_GRADIENT
                received["backward", schedule.rank_of[stage + 1], rank].append((stage + 1, n))
    assert sent == received
    assert all(source != target for _, source, target in sent)


@given(schedules(), st.data())
@settings(deadline=None)
def test_schedules_end_with_any_times(schedule: Schedule, data: st.DataObject) -> None:
    durations = st.lists(st.floats(0, 10), min_size=schedule.stages, max_size=schedule.stages)
    times = Times(*(data.draw(durations) for _ in range(4)), message=data.draw(st.floats(0, 10)))
    implied = simulate(schedule, times)
    explicit = simulate(with_sharding(with_communication(schedule), "run"), times)
    assert (implied.makespan, implied.busy, implied.peak) == (explicit.makespan, explicit.busy, explicit.peak)


@given(schedules(), st.sampled_from(["pass", "run", "step"]))
@settings(deadline=None)
def test_sharding_encloses_the_computations_of_a_stage(schedule: Schedule, unsharded_for: str) -> None:
    lowered = with_sharding(with_communication(schedule), unsharded_for)
    validate(lowered)
    for actions in lowered.actions:
        count = Counter((a.op, a.stage) for a in actions)
        stages = {a.stage for a in actions if a.op is F}
        trains = SCHEDULES[schedule.name].trains
        assert all(count[Op.UNSHARD, s] == count[Op.RESHARD, s] for s in stages)
        assert all((count[Op.UNSHARD, s] > 0) == (unsharded_for != "pass") for s in stages)
        assert all(count[Op.REDUCE, s] == trains for s in stages)
        assert [a for a in actions if a.op is Op.STEP] == [Action(Op.STEP)] * trains
        if unsharded_for == "step" or (unsharded_for == "run" and len(stages) == 1):
            assert all(count[Op.UNSHARD, s] == 1 for s in stages)
        shown = [a for a in actions if a.op in COMPUTATIONS | {Op.UNSHARD, Op.RESHARD}]
        for first, second in pairwise(shown):
            assert (first.op, second.op) != (Op.RESHARD, Op.UNSHARD) or first.stage != second.stage


@pytest.mark.parametrize("name", ["zb-h1", "zbv", "v-half", "v-min"])
def test_adjacent_gradients_are_one_backward_unless_the_stage_before_waits(name: str) -> None:
    schedule = make_schedule(name, 4, 16)
    start = {span.action: span.start for spans in simulate(schedule).spans for span in spans}
    computed = {(a.stage, a.micro_batch): start[a] for a in schedule if a.op in INPUT_GRADIENT}
    for actions in schedule.actions:
        for first, second in pairwise(actions):
            if first.op is INPUT and second == Action(WEIGHT, first.stage, first.micro_batch):
                assert computed[first.stage - 1, first.micro_batch] < start[second] + 1
    assert any(action.op is B for action in schedule)


@pytest.mark.parametrize("ranks", [9, 12, 17])
def test_patterns_of_v_schedules_fit_more_ranks(ranks: int) -> None:
    for name in ("v-half", "v-min"):
        validate(make_schedule(name, ranks, 2 * ranks))


def test_stages_are_placed_in_a_loop_or_a_v() -> None:
    assert placement_of("interleaved", 3, 2) == (0, 1, 2, 0, 1, 2)
    assert placement_of("zbv", 3) == (0, 1, 2, 2, 1, 0)
    assert make_schedule("inference", 3, 4, placement="v").rank_of == placement_of("zbv", 3)
    assert make_schedule("gpipe", 2, 4, chunks=3).rank_of == (0, 1) * 3
    assert make_schedule("zbv", 1, 4, 2, "loop") == make_schedule("zbv", 1, 4, 2, "v") == make_schedule("zbv", 1, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f1p", 2, 2), "pipeline schedule '1f1p' is unknown; did you mean '1f1b'?"),
        (("ZB_H1", 2, 2), "did you mean 'zb-h1'?"),
        (
            ("1f1b", 2, 2, 2),
            r"2 stages on each rank, expected 1 \(placement 'loop'\). Schedules for 2: naive, gpipe, int",
        ),
        (("interleaved", 2, 2, 1), "1 stages on each rank, expected at least 2"),
        (("zbv", 2, 2, 3), r"3 stages on each rank, expected 2 \(placement 'v'\)"),
        (("zbv", 2, 2, 2, "loop"), "'zbv': placement is 'loop', expected 'v'"),
        (("1f1b", 2, 2, 1, "v"), "'1f1b': placement is 'v', expected 'loop'"),
        (("1f1b", 0, 2), "ranks is 0, expected a whole number from 1 on"),
        (("1f1b", 2, 2.5), "micro_batches is 2.5"),
    ],
)
def test_wrong_arguments_are_named(arguments: tuple, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_schedule(*arguments)


def changed(schedule: Schedule, rank: int, actions: list[Action]) -> Schedule:
    return replace(schedule, actions=(*schedule.actions[:rank], tuple(actions), *schedule.actions[rank + 1 :]))


SMALL = make_schedule("1f1b", 2, 2)
FIRST, SECOND = (list(actions) for actions in SMALL.actions)
SHARDED = with_sharding(SMALL, "step")
DONE = list(SHARDED.actions[0])


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (changed(SMALL, 0, FIRST[:-1]), "rank 0: found 0 times, expected once: BACKWARD of stage 0, micro-batch 1"),
        (changed(SMALL, 1, [*SECOND, SECOND[0]]), "rank 1: found 2 times, expected once: FORWARD of stage 1"),
        (
            changed(SMALL, 0, [FIRST[0], *FIRST[2:], FIRST[1]]),
            "rank 0 before BACKWARD of stage 0, micro-batch 1; rank 1",
        ),
        (replace(SMALL, ranks=3), "ranks is 3, found actions or ranks for 2"),
        (replace(SMALL, rank_of=(0, 2)), r"rank_of is \(0, 2\), expected each rank below 2"),
        (changed(SHARDED, 0, [Action(Op.UNSHARD, 0), *DONE]), "UNSHARD of stage 0, but the stage is unsharded"),
        (changed(SHARDED, 0, [DONE[0], Action(Op.STEP), *DONE[1:]]), "STEP, but FORWARD of stage 0, micro-batch 0"),
        (changed(SHARDED, 0, DONE[:-1]), r"at the end stages \[\] are unsharded and stages \[0\] reduced, expected"),
    ],
)
def test_wrong_actions_are_named(schedule: Schedule, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        validate(schedule)


def test_schedules_need_the_standard_library_only() -> None:
    code = "import shardwise.pipeline.{}, sys; assert not {{'torch', 'pydantic', 'numpy'}} & sys.modules.keys()"
    for module in ("schedules", "lowering", "simulator", "picture"):
        subprocess.run([sys.executable, "-c", code.format(module)], check=True)
