"""Insertion of messages and sharding into a schedule of computations, and validation."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from operator import itemgetter

from shardwise.pipeline.actions import (
    COMPUTATIONS,
    RECEIVES,
    SENDS,
    SHARDING,
    WEIGHT_GRADIENT,
    Action,
    Op,
    Schedule,
    ScheduleError,
)
from shardwise.pipeline.simulator import simulate


def with_communication(schedule: Schedule) -> Schedule:
    """Insert a RECV before each computation that uses another rank's output, and a SEND after the output's computation.

    Tensors between stages of one rank need no message.
    """
    return replace(
        schedule,
        actions=tuple(
            tuple(a for action in actions for a in (schedule.receive(action), action, schedule.send(action)) if a)
            for actions in schedule.actions
        ),
    )


def with_sharding(schedule: Schedule, unsharded_for: str = "pass") -> Schedule:
    """Insert REDUCE of stages after their last backward pass, the STEP, and UNSHARD and RESHARD of stages.

    Args:
        unsharded_for: "step": from the first to the last computation of a stage. "run": each run of its computations
            that no computation of another stage interrupts. "pass": computations unshard what they need, without
            actions.
    """
    return replace(schedule, actions=tuple(tuple(_sharded(actions, unsharded_for)) for actions in schedule.actions))


def _sharded(actions: tuple[Action, ...], unsharded_for: str) -> Iterator[Action]:
    stages = [(action.stage, position) for position, action in enumerate(actions) if action.op in COMPUTATIONS]
    before: dict[int, Action] = {}
    after: dict[int, list[Action]] = defaultdict(list)
    if unsharded_for != "pass":
        for stage, run in groupby(sorted(stages) if unsharded_for == "step" else stages, key=itemgetter(0)):
            positions = [position for _, position in run]
            before[positions[0]] = Action(Op.UNSHARD, stage)
            after[positions[-1]].append(Action(Op.RESHARD, stage))
    last = {action.stage: position for position, action in enumerate(actions) if action.op in WEIGHT_GRADIENT}
    for stage, position in last.items():
        after[position].append(Action(Op.REDUCE, stage))
    for position, action in enumerate(actions):
        if position in before:
            yield before[position]
        yield action
        yield from after[position]
    if last:
        yield Action(Op.STEP)


def validate(schedule: Schedule) -> None:
    """Check that a schedule has each action once, on the right rank, and that it ends.

    Messages and sharding are checked if the schedule has any.

    Raises:
        ScheduleError: with the wrong action, or with the first blocked action of each rank.
    """
    where = f"schedule {schedule.name!r}"
    shape = {"ranks": len(schedule.actions), "stages": len(schedule.rank_of)}
    for key, found in shape.items():
        if found != getattr(schedule, key):
            raise ScheduleError(f"{where}: {key} is {getattr(schedule, key)}, found actions or ranks for {found}")
    if set(schedule.rank_of) != set(range(schedule.ranks)):
        raise ScheduleError(f"{where}: rank_of is {schedule.rank_of}, expected each rank below {schedule.ranks}")
    listed = [(rank, action) for rank, actions in enumerate(schedule.actions) for action in actions]
    counts = Counter(item for item in listed if item[1].op not in SHARDING)
    for rank, action in _expected(schedule, counts):
        number = counts.pop((rank, action), 0)
        if number != 1:
            raise ScheduleError(f"{where}, rank {rank}: found {number} times, expected once: {action}")
    for rank, action in counts:
        raise ScheduleError(f"{where}, rank {rank}: {action} is not needed there")
    if schedule.has(SHARDING):
        for rank, actions in enumerate(schedule.actions):
            _check_sharding(f"{where}, rank {rank}", actions)
    simulate(schedule)


def _expected(schedule: Schedule, found: Counter[tuple[int, Action]]) -> Iterator[tuple[int, Action]]:
    """Yield (rank, action) of all computations, and of messages if the schedule has any."""
    trains, communicates = schedule.has(WEIGHT_GRADIENT), schedule.has(SENDS | RECEIVES)
    for stage, rank in enumerate(schedule.rank_of):
        for n in range(schedule.micro_batches):
            split = (rank, Action(Op.BACKWARD_INPUT, stage, n)) in found
            backward = (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT) if split else (Op.BACKWARD,)
            for op in (Op.FORWARD, *backward) if trains else (Op.FORWARD,):
                action = Action(op, stage, n)
                yield rank, action
                if communicates:
                    yield from (
                        (rank, message) for message in (schedule.receive(action), schedule.send(action)) if message
                    )


def _check_sharding(where: str, actions: tuple[Action, ...]) -> None:
    unsharded: set[int] = set()
    reduced: set[int] = set()
    explicit = {action.stage for action in actions if action.op in (Op.UNSHARD, Op.RESHARD)}
    for position, action in enumerate(actions):
        stage, op = action.stage, action.op
        if op in COMPUTATIONS | {Op.RESHARD} and stage in explicit - unsharded:
            raise ScheduleError(f"{where}: {action}, but the stage is resharded")
        if op is Op.UNSHARD and stage in unsharded:
            raise ScheduleError(f"{where}: {action}, but the stage is unsharded")
        if op in WEIGHT_GRADIENT | {Op.REDUCE} and stage in reduced:
            raise ScheduleError(f"{where}: {action}, but the stage is reduced")
        if op is Op.STEP and position != len(actions) - 1:
            raise ScheduleError(f"{where}: STEP, but {actions[position + 1]} follows")
        unsharded ^= {stage} if op in (Op.UNSHARD, Op.RESHARD) else set()
        reduced |= {stage} if op is Op.REDUCE else set()
    stages = {action.stage for action in actions if action.op in WEIGHT_GRADIENT}
    if unsharded or reduced != stages or (stages and actions[-1].op is not Op.STEP):
        raise ScheduleError(
            f"{where}: at the end stages {sorted(unsharded)} are unsharded and stages {sorted(reduced)} reduced, "
            f"expected [] and {sorted(stages)}, then STEP"
        )
