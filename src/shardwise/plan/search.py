"""The best setting that fits: ZeRO stages, micro-batches, tiers of state, and arrangements of ranks.

Branch and bound (Land and Doig, 1960): the memory plan says what is feasible, and known settings bound the rest. What a
step computes in its passes is a lower bound of its time. Memory, and time by data sheets, are largest
sums of amounts that grow evenly with the micro-batch, so they are convex in it, and a line through two micro-batches is
a lower bound on either side. State that lies elsewhere, and layers that are recomputed, take no less time. Nothing is
left out that could be better: the result is that of trying all settings.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from shardwise.engine.plans import MARGIN, Offload, Planner, Room, Setting, SettingPlan, offloads
from shardwise.errors import ConfigError, UsageError
from shardwise.memory import Tier
from shardwise.plan.clock import Rates, StepTime
from shardwise.plan.cluster import Cluster
from shardwise.plan.events import Operator, Recorder
from shardwise.plan.layers import DeepPlanner
from shardwise.plan.time import plan_time
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
            which cannot fit, and `slower`, which cannot be faster than the best or than one with the same batch.
        refused: settings that the configuration does not allow, or without a planned time, by the reason.
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
    left = list(space)
    # Two micro-batches bound the others, of which the largest that fits is mostly the best.
    first = sorted({one.setting.micro_batch for one in left})[:2]

    def turn(one: Candidate) -> tuple[Any, ...]:
        micro = one.setting.micro_batch
        return one.setting.cost, one.branch.recompute, micro not in first, micro if micro in first else -micro

    left.sort(key=turn)
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


def _key(branch: Branch, setting: Setting, way: Offload | None, recompute: bool) -> Any:
    alike = branch.ranks, str(branch.keys), recompute
    return *alike, setting.stage, setting.micro_batch, setting.accumulation, way


def _no_slower(candidate: Candidate) -> Iterator[Any]:
    """Yield settings with the same batch that take no longer: state nearer to the device, layers not recomputed."""
    branch, setting = candidate.branch, candidate.setting
    ways: list[Offload | None] = [None] if setting.offload is None else [*offloads(setting.offload.path)]
    for recompute in {False, branch.recompute}:
        for way in ways[: ways.index(setting.offload) + 1]:
            if (way, recompute) != (setting.offload, branch.recompute):
                yield _key(branch, setting, way, recompute)


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
        self._known: dict[Any, list[tuple[int, int, float]]] = {}  # micro-batch, bytes of the device, seconds
        self._fitting: set[Any] = set()
        self._convex = isinstance(rates, Cluster)
        self._room = min((room.size for room in rooms if room.tiers == (Tier.DEVICE,)), default=None)

    def seconds(self, candidate: Candidate) -> float:
        """Return the planned seconds of a step; 0 if unknown."""
        return 0.0 if candidate.time is None else candidate.time.total

    def visit(self, candidate: Candidate) -> None:
        found, branch, setting = self._found, candidate.branch, candidate.setting
        kind = (id(branch.planner), setting.stage, setting.offload, setting.accumulation)
        if not self._everything:
            size, seconds = self._least(kind, setting.micro_batch)
            if setting.micro_batch >= self._failed.get(kind, setting.micro_batch + 1) or (
                self._room is not None and size * (1 + MARGIN) > self._room
            ):
                found.unplanned += 1
                return
            passes = self._passes.get((branch.passes, setting.micro_batch), 0.0)
            least = max(passes * setting.accumulation, seconds)
            slower = self._best is not None and candidate.value(self._objective, least) >= self._best
            if slower or not self._fitting.isdisjoint(_no_slower(candidate)):
                found.slower += 1
                return
        try:
            planned = self._plan(candidate)
        except (ConfigError, UsageError) as error:
            found.refused[str(error)] = found.refused.get(str(error), 0) + 1
            return
        found.planned += 1
        plan = planned.plan
        assert plan is not None
        self._known.setdefault(kind, []).append((setting.micro_batch, plan.total or 0, self.seconds(planned)))
        if not plan.fits:
            found.too_large += 1
            self._failed[kind] = min(setting.micro_batch, self._failed.get(kind, setting.micro_batch))
            known = found.smallest
            if known is None or known.plan is None or (plan.total or 0) < (known.plan.total or 0):
                found.smallest = planned
            return
        found.ranking.append(planned)
        self._fitting.add(_key(branch, setting, setting.offload, branch.recompute))
        value = planned.value(self._objective, self.seconds(planned))
        self._best = value if self._best is None else min(self._best, value)

    def _least(self, kind: Any, micro: int) -> tuple[float, float]:
        """Return lower bounds of bytes and seconds with a micro-batch, by lines through two others on the same side."""
        points = sorted(self._known.get(kind, ()))
        below, above = [one for one in points if one[0] < micro][-2:], [one for one in points if one[0] > micro][:2]
        size = seconds = 0.0
        for pair in (below, above):
            if len(pair) == 2:
                (one, bytes_one, s_one), (two, bytes_two, s_two) = pair
                along = (micro - one) / (two - one)
                size = max(size, bytes_one + (bytes_two - bytes_one) * along)
                seconds = max(seconds, s_one + (s_two - s_one) * along)
        return size, seconds if self._convex else 0.0

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
        found = plan_time(planner, setting, self._rates, self._limit, recorder).time
        costs = self._rates.costs(branch.ranks)
        # Operators without FLOPs differ by stage.
        operators = [one for _, one in recorder.passes[0].events if isinstance(one, Operator) and one.flops]
        return found, sum(map(costs.operator, operators))
