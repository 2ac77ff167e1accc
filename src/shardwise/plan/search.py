"""The best setting that fits: ZeRO stages, micro-batches, tiers of state, and arrangements of ranks.

Branch and bound (Land and Doig, 1960): the memory plan says what is feasible, and what a step computes in its passes is
a lower bound of its time. Nothing is left out that could be better, so the result is that of trying all settings.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from shardwise.engine.plans import MARGIN, Offload, Planner, Room, Setting, SettingPlan
from shardwise.errors import ConfigError
from shardwise.plan.clock import Rates, StepTime, step_time
from shardwise.plan.events import Operator, Recorder
from shardwise.plan.layers import DeepPlanner
from shardwise.units import format_size
from shardwise.zero.units.plan import TABLE

Objective = Literal["throughput", "latency", "cost", "ranks"]
OBJECTIVES = {
    "throughput": "the most samples a second",
    "latency": "the shortest step",
    "cost": "the fewest rank-hours for a sample",
    "ranks": "the fewest ranks, then the most samples a second",
}


@dataclass(frozen=True)
class Branch:
    """A model on an arrangement of ranks.

    Attributes:
        planner: of the model and its configuration.
        ranks: of the whole job.
        passes: equal for branches whose ranks compute the same in a pass.
        keys: of the configuration that belong to the arrangement.
        recompute: the layers are recomputed.
    """

    planner: Planner
    ranks: int
    passes: Any = None
    keys: dict[str, Any] = field(default_factory=dict)
    recompute: bool = False


@dataclass(frozen=True)
class Candidate:
    """A setting of a branch; after its dry run with its memory, and with its time if rates are known."""

    branch: Branch
    setting: Setting
    plan: SettingPlan | None = None
    time: StepTime | None = None

    @property
    def samples(self) -> int:
        """Samples of a step on all ranks."""
        return int(self.setting.config["train_batch_size"])

    @property
    def config(self) -> dict[str, Any]:
        """The keys to set."""
        return {**self.branch.keys, **self.setting.config}

    def value(self, objective: Objective, seconds: float) -> tuple[float, ...]:
        """Return what the objective minimises, for a step of `seconds`."""
        each = seconds / self.samples
        found = {"throughput": (each,), "latency": (seconds,), "cost": (self.branch.ranks * each,)}
        return found.get(objective, (self.branch.ranks, each))


@dataclass
class Search:
    """Result of a search.

    Attributes:
        ranking: candidates that fit, the best first; those that cannot be the best are not among them.
        smallest: the candidate that needs the least memory of the device, if none fits.
        settings: in the space. `planned`: by a dry run, of which `too_large` do not fit. Not planned are `unplanned`,
            which need more than one that does not fit, and `slower`, whose passes take longer than the best step.
        refused: settings that the configuration does not allow, by the reason.
        seconds: that the search took.
    """

    ranking: list[Candidate] = field(default_factory=list)
    smallest: Candidate | None = None
    settings: int = 0
    planned: int = 0
    too_large: int = 0
    unplanned: int = 0
    slower: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0


def candidates(
    branch: Branch,
    ways: Sequence[Offload],
    *,
    batch: int | None = None,
    stages: Iterable[int] = TABLE,
    micro_batches: Sequence[int] = (1, 2, 4, 8, 16, 32, 64),
) -> Iterator[Candidate]:
    """Yield the settings of a branch: with accumulation for a step of `batch` samples, or without."""
    now = branch.planner.target.setting
    copies = now.ranks // (now.sequence * now.tensor)
    if batch is not None and batch % copies:
        return
    for micro in micro_batches:
        if batch is not None and batch // copies % micro:
            continue
        steps = 1 if batch is None else batch // copies // micro
        for stage in stages:
            for way in ways:
                # One rank shards nothing: only the lowest stage that supports the tiers.
                if stage == way.stage or (stage > way.stage and now.ranks > 1):
                    yield Candidate(
                        branch, replace(now, stage=stage, micro_batch=micro, accumulation=steps, offload=way)
                    )


def search(
    space: Iterable[Candidate],
    rooms: Sequence[Room],
    rates: Rates | None = None,
    objective: Objective = "throughput",
    limit: float = 0.0,
    progress: Callable[[int, int], None] | None = None,
    *,
    everything: bool = False,
) -> Search:
    """Return the best settings that fit.

    Args:
        space: settings; `candidates` makes those of a branch.
        rooms: bytes that a rank has.
        rates: by which times are planned; None: the first in the order of `Setting.cost` that fits is the best.
        objective: what is to be the least or the most.
        limit: seconds in which operators that measured rates lack are measured here, for each setting.
        progress: called with the settings that are done, and their number.
        everything: rank all that fit, also those that cannot be the best.
    """
    begun, found = time.monotonic(), Search()
    left = sorted(space, key=lambda one: one.setting.cost)
    found.settings = len(left)
    state = _State(found, rooms, rates, objective, limit, everything)
    for done, candidate in enumerate(left):
        if progress is not None:
            progress(done, len(left))
        state.visit(candidate)
        if rates is None and found.ranking and not everything:
            break
    found.ranking.sort(key=lambda one: (*one.value(objective, state.seconds(one)), one.setting.cost))
    found.seconds = time.monotonic() - begun
    return found


def in_words(found: Search) -> str:
    """Return what is needed at least, of a search in which nothing fits."""
    one = found.smallest
    if one is None or one.plan is None:
        return "; ".join(found.refused) or "There is no setting for this batch and these ranks."
    elsewhere = "".join(f", {format_size(size)} on {tier}" for tier, size in one.plan.elsewhere.items())
    return (
        f"The least: {one.setting} needs {format_size(round((one.plan.total or 0) * (1 + MARGIN)))} of a rank's device"
        f"{elsewhere} ({MARGIN:.0%} to spare in it)."
    )


class _State:
    def __init__(
        self,
        found: Search,
        rooms: Sequence[Room],
        rates: Rates | None,
        objective: Objective,
        limit: float,
        everything: bool,
    ) -> None:
        self._found, self._rooms, self._rates, self._objective, self._limit = found, rooms, rates, objective, limit
        self._everything = everything
        self._best: tuple[float, ...] | None = None
        self._passes: dict[Any, float] = {}  # seconds that a micro-batch's passes compute
        self._failed: dict[Any, int] = {}  # smallest micro-batch that does not fit

    def seconds(self, candidate: Candidate) -> float:
        """Return the planned seconds of a step; 0 if unknown."""
        return 0.0 if candidate.time is None else candidate.time.total

    def visit(self, candidate: Candidate) -> None:
        found, branch, setting = self._found, candidate.branch, candidate.setting
        kind = (id(branch.planner), setting.stage, setting.offload)
        if setting.micro_batch >= self._failed.get(kind, setting.micro_batch + 1):
            found.unplanned += 1
            return
        passes = self._passes.get((branch.passes, setting.micro_batch))
        least = None if passes is None else candidate.value(self._objective, passes * setting.accumulation)
        if least is not None and self._best is not None and least >= self._best and not self._everything:
            found.slower += 1
            return
        try:
            planned = self._plan(candidate)
        except ConfigError as error:
            found.refused[str(error)] = found.refused.get(str(error), 0) + 1
            return
        found.planned += 1
        plan = planned.plan
        assert plan is not None
        if not plan.fits:
            found.too_large += 1
            self._failed[kind] = min(setting.micro_batch, self._failed.get(kind, setting.micro_batch))
            known = found.smallest
            if known is None or known.plan is None or (plan.total or 0) < (known.plan.total or 0):
                found.smallest = planned
            return
        found.ranking.append(planned)
        value = planned.value(self._objective, self.seconds(planned))
        self._best = value if self._best is None else min(self._best, value)

    def _plan(self, candidate: Candidate) -> Candidate:
        branch, setting = candidate.branch, candidate.setting
        if self._rates is None:
            return replace(candidate, plan=branch.planner.plan(setting, self._rooms))
        found, computing = self._timed(branch, branch.planner, setting)
        self._passes.setdefault((branch.passes, setting.micro_batch), computing)
        return replace(candidate, plan=branch.planner.plan(setting, self._rooms), time=found)

    def _timed(self, branch: Branch, planner: Planner, setting: Setting) -> tuple[StepTime, float]:
        """Return the time of a step, and the seconds that the operators with FLOPs of a micro-batch take."""
        if isinstance(planner, DeepPlanner):
            few, more = (self._timed(branch, each, setting) for each in (planner.few, planner.more))
            return planner.deep(few[0], more[0]), planner.deep(few[1], more[1])
        assert self._rates is not None
        recorder = Recorder()
        planner.record(setting, recorder)
        self._rates.complete(recorder, branch.ranks, self._limit)
        costs = self._rates.costs(branch.ranks)
        # Operators without FLOPs differ by stage.
        operators = [one for _, one in recorder.passes[0].events if isinstance(one, Operator) and one.flops]
        return step_time(recorder.passes, setting.accumulation, costs), sum(map(costs.operator, operators))
