"""Simulation of a pipeline schedule: times, idle share and activation memory of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardwise.pipeline.actions import (
    COMPUTATIONS,
    INPUT_GRADIENT,
    RECEIVES,
    SENDS,
    WEIGHT_GRADIENT,
    Action,
    Op,
    Schedule,
    ScheduleError,
)

PerStage = float | Sequence[float]
"""One value for all stages, or one for each."""


class Span(NamedTuple):
    """Start and end of an action, in any unit."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Times:
    """Durations of computations of one micro-batch by stage, and of a message between ranks.

    Attributes:
        backward: duration of both gradients in one pass; None: the sum of the two.
        message: latency; messages do not block computations, nor each other.
    """

    forward: PerStage = 1.0
    input_gradient: PerStage = 1.0
    weight_gradient: PerStage = 1.0
    backward: PerStage | None = None
    message: float = 0.0

    def of(self, action: Action) -> float:
        """Return the duration of a computation; 0 for other actions."""
        if action.op not in COMPUTATIONS:
            return 0.0
        if action.op is Op.BACKWARD and self.backward is None:
            return _at(self.input_gradient, action.stage) + _at(self.weight_gradient, action.stage)
        return _at(getattr(self, action.op.value), action.stage)


def _at(value: PerStage, stage: int) -> float:
    return value if isinstance(value, int | float) else value[stage]


@dataclass(frozen=True)
class Simulation:
    """Result of a simulation.

    Attributes:
        spans: for each rank its actions, in order.
        busy: for each rank the time in computations.
        peak: for each rank the most activations that it holds at a time.
    """

    spans: tuple[tuple[Span, ...], ...]
    busy: tuple[float, ...]
    peak: tuple[float, ...]

    @property
    def makespan(self) -> float:
        """Time from the first action of any rank to the last end."""
        return max(span.end for spans in self.spans for span in spans)

    @property
    def idle(self) -> tuple[float, ...]:
        """For each rank the share of the makespan without a computation."""
        return tuple(1 - busy / self.makespan for busy in self.busy)

    @property
    def idle_share(self) -> float:
        """Share of the makespan without a computation, mean of all ranks."""
        return sum(self.idle) / len(self.idle)

    @property
    def gaps(self) -> tuple[float, ...]:
        """For each rank the time without a computation between its first and its last action."""
        return tuple(s[-1].end - s[0].start - busy for s, busy in zip(self.spans, self.busy, strict=True))


def simulate(
    schedule: Schedule, times: Times | None = None, activations: PerStage = 1.0, kept: float = 1.0
) -> Simulation:
    """Simulate one batch, in time linear in the number of actions.

    If the schedule has no SEND and RECV, each output arrives one message after its computation.

    Args:
        times: durations; None: 1 for forward, input gradient and weight gradient each.
        activations: memory that a forward keeps for the backward pass.
        kept: share of these that remains from the input gradient until the weight gradient.

    Raises:
        ScheduleError: ranks wait for each other.
    """
    run = _Run(schedule, times or Times(), activations, kept)
    runnable = list(range(schedule.ranks))
    while runnable:
        runnable += run.advance(runnable.pop())
    run.check_ended()
    return Simulation(tuple(map(tuple, run.spans)), tuple(run.busy), tuple(run.peak))


class _Run:
    """State of a simulation.

    Attributes:
        known: end of each action; of a SEND, the arrival of the message. A BACKWARD counts as a BACKWARD_INPUT.
        waiting: rank that waits for a message, by its SEND.
    """

    def __init__(self, schedule: Schedule, times: Times, activations: PerStage, kept: float) -> None:
        ranks = range(schedule.ranks)
        self.schedule, self.times, self.activations, self.kept = schedule, times, activations, kept
        self.explicit, self.trains = schedule.has(SENDS | RECEIVES), schedule.has(WEIGHT_GRADIENT)
        self.spans: list[list[Span]] = [[] for _ in ranks]
        self.busy, self.held, self.peak, self.free = ([0.0 for _ in ranks] for _ in range(4))
        self.known: dict[Action, float] = {}
        self.waiting: dict[Action, int] = {}

    def advance(self, rank: int) -> list[int]:
        """Execute actions of a rank until one waits, and return the ranks that can continue."""
        actions, spans = self.schedule.actions[rank], self.spans[rank]
        resumed: list[int] = []
        while len(spans) < len(actions):
            action = actions[len(spans)]
            needed = self.needed(action)
            missing = next((key for key in needed if key not in self.known), None)
            if missing is not None:
                self.waiting[missing] = rank
                break
            start = max([self.free[rank], *(self.known[key] for key in needed)])
            end = self.free[rank] = start + self.times.of(action)
            spans.append(Span(rank, action, start, end))
            self.busy[rank] += end - start
            self.hold(rank, action)
            resumed += self.publish(action, end)
        return resumed

    def needed(self, action: Action) -> list[Action]:
        """Return the keys of `known` that an action needs."""
        op, stage, n = action.op, action.stage, action.micro_batch
        if op is Op.SEND_FORWARD:
            return [Action(Op.FORWARD, stage, n)]
        if op is Op.RECV_FORWARD:
            return [Action(Op.SEND_FORWARD, stage - 1, n)]
        if op is Op.RECV_BACKWARD:
            return [Action(Op.SEND_BACKWARD, stage + 1, n)]
        if op in (Op.BACKWARD_WEIGHT, Op.SEND_BACKWARD):
            return [Action(Op.BACKWARD_INPUT, stage, n)]
        if op is not Op.FORWARD and op not in INPUT_GRADIENT:
            return []
        found = [] if op is Op.FORWARD else [Action(Op.FORWARD, stage, n)]
        receive = self.schedule.receive(action)
        if receive is not None:
            found += [receive] if self.explicit else self.needed(receive)
        elif op is Op.FORWARD and stage > 0:
            found.append(Action(Op.FORWARD, stage - 1, n))
        elif op is not Op.FORWARD and stage < self.schedule.stages - 1:
            found.append(Action(Op.BACKWARD_INPUT, stage + 1, n))
        return found

    def hold(self, rank: int, action: Action) -> None:
        """Count the activations that an action keeps or releases."""
        if action.op not in COMPUTATIONS:
            return
        size = _at(self.activations, action.stage)
        if action.op is Op.FORWARD:
            self.peak[rank] = max(self.peak[rank], self.held[rank] + size)
            self.held[rank] += size if self.trains else 0
        else:
            later = {Op.BACKWARD: 1.0, Op.BACKWARD_INPUT: 1 - self.kept, Op.BACKWARD_WEIGHT: self.kept}
            self.held[rank] -= size * later[action.op]

    def publish(self, action: Action, end: float) -> list[int]:
        """Enter the result of an action into `known`, and return the rank that can continue, if any."""
        whole = action.op is Op.BACKWARD
        self.known[Action(Op.BACKWARD_INPUT, action.stage, action.micro_batch) if whole else action] = end
        message = action if action.op in SENDS else None if self.explicit else self.schedule.send(action)
        if message is None:
            return []
        self.known[message] = end + self.times.message
        return [self.waiting.pop(message)] if message in self.waiting else []

    def check_ended(self) -> None:
        """Raise a ScheduleError that names the first action of each rank that cannot start."""
        blocked = [
            f"rank {rank} before {actions[len(spans)]}"
            for rank, (actions, spans) in enumerate(zip(self.schedule.actions, self.spans, strict=True))
            if len(spans) < len(actions)
        ]
        if blocked:
            raise ScheduleError(f"schedule {self.schedule.name!r} does not end; blocked: {'; '.join(blocked)}")
