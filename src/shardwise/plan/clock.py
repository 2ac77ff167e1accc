"""Time of a step: recorded events, each with its seconds, on the clocks of a rank."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from shardwise.plan.events import Launch, Operator, Pass, Recorder, UnitWork, Wait


@dataclass(frozen=True)
class Costs:
    """How long things take on a rank of a machine, in seconds.

    Attributes:
        operator: of an operator, with as many ranks at work as share the machine.
        collective: of a collective, from the launch on an idle link to its end.
        link: name of the link that a collective keeps busy; "": groups do not share links.
        measured: whether the seconds of an operator were measured, rather than estimated from others.
        host: of the host for each operator, besides the operator itself; `launch`: of a collective
            that is not waited for at once.
        interference: seconds by which a second of a collective in flight delays computing.
        asynchronous: the device works while the host goes on, as a GPU does.
    """

    operator: Callable[[Operator], float]
    collective: Callable[[Launch], float]
    link: Callable[[Launch], str] = lambda launch: ""
    measured: Callable[[Operator], bool] = lambda operator: True
    host: float = 0.0
    launch: float = 0.0
    interference: float = 0.0
    asynchronous: bool = False


class Rates(Protocol):
    """Where the seconds come from: a measured machine, or data sheets."""

    @property
    def origin(self) -> str:
        """A sentence that says where the rates come from."""

    def complete(self, recorder: Recorder, ranks: int, limit: float) -> None:
        """Measure operators of a recorded step that lack, in up to `limit` seconds. Raises UsageError if more lacks."""

    def costs(self, ranks: int) -> Costs:
        """Return how long things take with so many ranks."""

    @property
    def peaks(self) -> Mapping[str, float]:
        """FLOP/s that a card has at most, by type; empty if unknown."""

    @property
    def disk(self) -> tuple[float, float] | None:
        """Bytes/s that a rank reads from its disk and writes to it; None: unknown."""

    @property
    def host_link(self) -> float | None:
        """Bytes/s between a rank's device and the host; None: it is the host's memory, or not measured."""


def _zeros() -> dict[Any, float]:
    return defaultdict(float)


@dataclass
class StepTime:
    """Seconds of a rank's step.

    Attributes:
        total: from the beginning of the first forward pass to the end of the update.
        phases: of "forward", "backward" and "step"; "transfers": of offloaded state, beyond the backward pass; "idle":
            of a pipeline's rank that waits for others.
        computing: of operators; `communicating`: of collectives, hidden or not; `waiting`: without computing, because a
            collective has not ended; `host`: of the host besides operators, where the device waits for it.
        estimated: part of `computing` of operators that were not measured.
        flops: by type of the operators; `moved`: bytes that operators read and write.
        transfers: of offloaded state between tiers, hidden or not.
        collectives: seconds by operation and group; `sent`: bytes that the rank sends; `links`: which link.
        units: work by unit.
    """

    total: float = 0.0
    phases: dict[str, float] = field(default_factory=_zeros)
    computing: float = 0.0
    communicating: float = 0.0
    waiting: float = 0.0
    host: float = 0.0
    estimated: float = 0.0
    flops: Counter[str] = field(default_factory=Counter)
    moved: int = 0
    transfers: float = 0.0
    collectives: dict[tuple[str, str], float] = field(default_factory=_zeros)
    sent: Counter[tuple[str, str]] = field(default_factory=Counter)
    links: dict[tuple[str, str], str] = field(default_factory=dict)
    units: dict[str, UnitWork] = field(default_factory=lambda: defaultdict(UnitWork))


class Clock:
    """Goes through events; the device, the host and each link (or group of ranks) have a time of their own."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self.found = StepTime()
        self._host = self._device = 0.0
        self._links: dict[str, float] = {}  # when the last collective of a link or group ends
        self._ends: dict[int, float] = {}
        self._carried: deque[float] = deque()
        self._began = 0.0

    def begin_step(self) -> None:
        """Begin a step, while collectives of the step before may be in flight: it waits for them in their order."""
        self._carried = deque(self._ends.values())
        self._ends = {}
        self._began, self.found = self.now, StepTime()

    def go(self, one: Pass, phase_of: str | None = None) -> None:
        """Go through the events of a pass; `phase_of`: the phase of all of them, None: their own."""
        for unit, work in one.units.items():
            self.found.units[unit].add(work)
        for own, event in one.events:
            phase = phase_of or own
            before = self.now
            if isinstance(event, Operator):
                self._compute(event)
            elif isinstance(event, Launch):
                self._launch(event)
            else:
                self._wait(event)
            self.found.phases[phase] += self.now - before
        self.found.total = self.now - self._began

    @property
    def now(self) -> float:
        """The time when host and device have done everything so far."""
        return max(self._host, self._device)

    def _compute(self, event: Operator) -> None:
        seconds, costs, found = self._costs.operator(event), self._costs, self.found
        self._host += costs.host
        begins = max(self._device, self._host)
        found.host += begins - self._device
        in_flight = max(self._links.values(), default=0.0) - begins
        slowed = seconds + costs.interference * max(0.0, min(seconds, in_flight))
        found.computing += slowed
        found.moved += event.moved
        if event.flops:
            found.flops[event.dtype] += event.flops
        found.estimated += 0.0 if costs.measured(event) else slowed
        self._device = begins + slowed
        if not costs.asynchronous:
            self._host = self._device

    def _launch(self, event: Launch) -> None:
        seconds, what = self._costs.collective(event), (event.op, event.group)
        self.found.communicating += seconds
        self.found.collectives[what] += seconds
        self.found.sent[what] += event.sent
        self.found.links[what] = link = self._costs.link(event)
        launch = 0.0 if event.at_once else self._costs.launch
        self._host += launch
        if not self._costs.asynchronous:
            self.found.host += launch
            self._device = self._host
        # It reads what the device has computed before.
        begins = max(self._device, self._host, self._links.get(link or event.group, 0.0))
        self._links[link or event.group] = self._ends[event.number] = begins + seconds

    def _wait(self, event: Wait) -> None:
        end = self._ends.pop(event.number, None)
        if end is None:
            end = self._carried.popleft() if self._carried else 0.0
        self.found.waiting += max(0.0, end - max(self._device, self._host))
        self._device = max(self._device, end)
        if not self._costs.asynchronous:
            self._host = max(self._host, end)


def step_time(passes: Sequence[Pass], accumulation: int, costs: Costs) -> StepTime:
    """Return the time of a step of `accumulation` micro-batches from the recorded ones: the first, one in the middle
    (from three on), and the last.
    """
    clock = Clock(costs)
    middle = [passes[1]] * (accumulation - 2) if len(passes) > 2 else []
    for _ in range(2):  # the first step leaves behind what the others begin with
        clock.begin_step()
        for one in (passes[0], *middle, *passes[1:][-1:]):
            clock.go(one)
    return clock.found
