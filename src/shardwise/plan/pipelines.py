"""Time of a step of a pipeline: its schedule, simulated with the times of the computations of each stage."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardwise.pipeline.actions import Op, Schedule
from shardwise.pipeline.simulator import Times, simulate
from shardwise.plan.clock import Clock, Costs, StepTime
from shardwise.plan.events import Launch, Pass

_PHASES = {
    Op.FORWARD: "forward",
    Op.BACKWARD: "backward",
    Op.BACKWARD_INPUT: "backward",
    Op.BACKWARD_WEIGHT: "backward",
}


@dataclass(frozen=True)
class _Position:
    """Seconds of a position's computations of a micro-batch by stage. `once`: of what a step has besides: waits for
    updated parameters in the first forward pass, reductions of gradients in the last backward pass, and the update.
    """

    time: StepTime
    usual: dict[tuple[Op, int], float]
    once: float


def pipeline_time(
    schedule: Schedule, messages: Sequence[Launch], passes: Sequence[Sequence[Pass]], costs: Costs, slow: Costs
) -> tuple[StepTime, tuple[float, ...], list[StepTime]]:
    """Return the time of a step at the position that is busy longest, the idle share of each position, and the times of
    all positions without waits for others.

    Args:
        messages: between stages.
        passes: recorded at each position: its computations in order, and the step.
        costs: of all ranks; `slow`: of the position that is busy longest, where one rank is slower than the others.
    """
    found = [_position(schedule, place, passes[place], costs) for place in range(schedule.ranks)]
    last = max(range(schedule.ranks), key=lambda place: found[place].time.total)
    if slow is not costs:
        found[last] = _position(schedule, last, passes[last], slow)

    def at(op: Op) -> list[float]:
        return [found[place].usual.get((op, stage), 0.0) for stage, place in enumerate(schedule.rank_of)]

    parts = at(Op.BACKWARD_INPUT), at(Op.BACKWARD_WEIGHT)
    times = Times(
        at(Op.FORWARD),
        *parts,
        backward=[whole or one + other for whole, one, other in zip(at(Op.BACKWARD), *parts, strict=True)],
        message=max(map(costs.collective, messages), default=0.0),
    )
    simulation = simulate(schedule, times)
    time = replace(found[last].time, phases=dict(found[last].time.phases))
    total = max(time.total, simulation.makespan + max(one.once for one in found))
    time.phases["idle"] = total - time.total
    time.total = total
    idle = tuple(1 - (busy + one.once) / total for busy, one in zip(simulation.busy, found, strict=True))
    return time, idle, [one.time for one in found]


def _position(schedule: Schedule, place: int, recorded: Sequence[Pass], costs: Costs) -> _Position:
    passes: dict[tuple[Op, int], list[Pass]] = defaultdict(list)
    for one in recorded:
        (name,) = one.phases
        passes[Op(name), -1 if one.stage is None else one.stage].append(one)
    stages = [stage for stage, owner in enumerate(schedule.rank_of) if owner == place]
    order = [(Op.FORWARD, stage) for stage in stages]
    order += [(op, stage) for stage in reversed(stages) for op in _PHASES if op is not Op.FORWARD]
    clock, count = Clock(costs), schedule.micro_batches
    took: dict[tuple[Op, int], list[float]] = {}
    step = 0.0
    for _ in range(2):  # the first step leaves behind what the others begin with
        clock.begin_step()
        took = defaultdict(list)
        for number in range(count):
            for key in order:
                if known := passes.get(key):
                    one = known[-1] if number == count - 1 else known[min(number, 1, max(0, len(known) - 2))]
                    took[key].append(_seconds(clock, one, _PHASES[key[0]]))
        step = sum(_seconds(clock, one, "step") for one in passes[Op.STEP, -1])
    usual, once = {}, step
    for key, values in took.items():
        others = values[1:] if key[0] is Op.FORWARD else values[:-1]
        usual[key] = statistics.median(others or values)
        once += values[0 if key[0] is Op.FORWARD else -1] - usual[key]
    return _Position(clock.found, usual, once)


def _seconds(clock: Clock, one: Pass, phase: str) -> float:
    begun = clock.now
    clock.go(one, phase)
    return clock.now - begun
