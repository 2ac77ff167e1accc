"""The best setting that fits: ZeRO stages, micro-batches, tiers of state, and arrangements of ranks.

Branch and bound (Land and Doig, 1960): the memory plan says what is feasible, and known settings bound the rest. What a
step computes in its passes is a lower bound of its time, and activations are one of its memory; neither depends on the
stage or on where state lies. Memory, and time by data sheets, are largest sums of amounts that grow evenly with the
micro-batch, so they are convex in it, and a line through two micro-batches is a lower bound on either side. State that
lies elsewhere, layers that are recomputed, and a higher of the stages 1 to 3, which sends more, are taken to be no
faster. Nothing is left out that could be better: the result is that of trying all settings.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from shardwise.engine.plans import MARGIN, Offload, Planner, Room, Setting, SettingPlan, offloads
from shardwise.errors import ConfigError, UsageError
from shardwise.memory import Category, Tier
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
        refused: settings that the configuration does not allow, or that cannot be planned, by the reason.
        unknown: why a setting that the configuration allows cannot be planned; empty if all can.
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
    unknown: str = ""
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
    state = _State(found, rooms, rates, objective, limit, first)
    # The best first: bounds rise while settings become known, so each is computed anew at its turn.
    turns = [(() if everything else state.bound(one), place) for place, one in enumerate(left)]
    heapq.heapify(turns)
    while turns:
        bound, place = heapq.heappop(turns)
        candidate = left[place]
        if progress is not None:
            progress(found.settings - len(turns) - 1, found.settings)
        if not everything:
            now = state.bound(candidate)
            if now > bound:
                heapq.heappush(turns, (now, place))
                continue
            if state.is_hopeless(candidate, now):
                continue
        state.plan(candidate)
        if rates is None and found.ranking and not everything:
            break
    if not found.ranking:
        state.plan_smallest()
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
        + (f" Others cannot be planned: {found.unknown}." if found.unknown else "")
    )


_Kind = tuple[int, str, bool, Offload | None, int, int]
"""What settings that differ in their micro-batch have in common: ranks, keys of their arrangement, whether layers are
recomputed, tiers, accumulation, ZeRO stage."""


def _kind(one: Candidate) -> _Kind:
    setting, branch = one.setting, one.branch
    return branch.ranks, str(branch.keys), branch.recompute, setting.offload, setting.accumulation, setting.stage


def _no_slower(kind: _Kind) -> Iterator[_Kind]:
    """Yield kinds that take no longer with the same micro-batch: lower stages that shard, state nearer to the device,
    layers not recomputed; and the kind itself.
    """
    ranks, keys, recompute, way, accumulation, stage = kind
    ways = [None] if way is None else [one for one in offloads(way.path, nested=False) if one.is_no_farther(way)]
    for near in ways:
        for again in {False, recompute}:
            for lower in range(min(stage, 1), stage + 1):
                yield ranks, keys, again, near, accumulation, lower


class _State:
    def __init__(
        self,
        found: Search,
        rooms: Sequence[Room],
        rates: Rates | None,
        objective: Objective,
        limit: float,
        first: Sequence[int],
    ) -> None:
        self._found, self._rooms, self._rates, self._objective, self._limit = found, rooms, rates, objective, limit
        self._best: tuple[float, ...] | None = None
        self._first = () if rates is None else first
        self._failed: dict[_Kind, int] = {}  # smallest micro-batch that does not fit
        # By micro-batch: of passes the bytes of activations and the seconds that they compute, of kinds of settings the
        # bytes of the device and the seconds of a step.
        self._passes: dict[Any, dict[int, tuple[float, float]]] = {}
        self._kinds: dict[_Kind, dict[int, tuple[float, float]]] = {}
        self._settled: set[tuple[_Kind, int]] = set()  # fit, or cannot be the best
        self._no_slower: dict[_Kind, list[_Kind]] = {}
        self._unplanned: list[Candidate] = []
        self._convex = isinstance(rates, Cluster)
        self._room = min((room.size for room in rooms if room.tiers == (Tier.DEVICE,)), default=None)

    def seconds(self, candidate: Candidate) -> float:
        """Return the planned seconds of a step; 0 if unknown."""
        return 0.0 if candidate.time is None else candidate.time.total

    def bound(self, candidate: Candidate) -> tuple[float, ...]:
        """Return a lower bound of what the objective minimises; of nothing known the least."""
        setting, kind = candidate.setting, _kind(candidate)
        known = self._passes.get(candidate.branch.passes, {})
        if setting.micro_batch in self._first and setting.micro_batch not in known:
            return ()  # planned first, because it bounds many others
        seconds = self._least(known, setting.micro_batch)[1] * setting.accumulation
        if kind not in self._no_slower:
            self._no_slower[kind] = [*_no_slower(kind)]
        for near in self._no_slower[kind]:
            if near in self._kinds:
                seconds = max(seconds, self._least(self._kinds[near], setting.micro_batch)[1])
        return candidate.value(self._objective, seconds)

    def is_hopeless(self, candidate: Candidate, bound: tuple[float, ...]) -> bool:
        """Count a candidate that cannot fit, or cannot be the best; return False for others."""
        micro, kind = candidate.setting.micro_batch, _kind(candidate)
        activations, _ = self._least(self._passes.get(candidate.branch.passes, {}), micro)
        size, _ = self._least(self._kinds.get(kind, {}), micro)
        if micro >= self._failed.get(kind, micro + 1) or (
            self._room is not None and max(size, activations) * (1 + MARGIN) > self._room
        ):
            self._found.unplanned += 1
            self._unplanned.append(candidate)
            return True
        slower = self._best is not None and bound >= self._best
        if bound and (slower or any((near, micro) in self._settled for near in self._no_slower[kind])):
            self._found.slower += 1
            self._settled.add((kind, micro))
            return True
        return False

    def plan_smallest(self) -> None:
        """Plan the settings that need the least: the smallest micro-batches at the highest stage."""
        keys = [(-one.setting.stage, one.setting.micro_batch) for one in self._unplanned]
        for key, one in zip(keys, self._unplanned, strict=True):
            if key == min(keys):
                self._found.unplanned -= 1
                self.plan(one)

    def plan(self, candidate: Candidate) -> None:
        """Plan a candidate, and rank it if it fits."""
        found, setting, kind = self._found, candidate.setting, _kind(candidate)
        try:
            planned = self._plan(candidate)
        except (ConfigError, UsageError) as error:
            found.refused[str(error)] = found.refused.get(str(error), 0) + 1
            if isinstance(error, UsageError):
                found.unknown = str(error)
            return
        found.planned += 1
        plan = planned.plan
        assert plan is not None
        self._kinds.setdefault(kind, {})[setting.micro_batch] = plan.total or 0, self.seconds(planned)
        if self._rooms and not plan.fits:
            found.too_large += 1
            self._failed[kind] = min(setting.micro_batch, self._failed.get(kind, setting.micro_batch))
            known = found.smallest
            if known is None or known.plan is None or (plan.total or 0) < (known.plan.total or 0):
                found.smallest = planned
            return
        found.ranking.append(planned)
        self._settled.add((kind, setting.micro_batch))
        value = planned.value(self._objective, self.seconds(planned))
        self._best = value if self._best is None else min(self._best, value)

    def _least(self, known: dict[int, tuple[float, float]], micro: int) -> tuple[float, float]:
        """Return bytes and seconds with a micro-batch, or lower bounds: lines through two others on the same side."""
        if micro in known:
            return known[micro]
        size = seconds = 0.0
        sizes = sorted(known)
        for pair in ([one for one in sizes if one < micro][-2:], [one for one in sizes if one > micro][:2]):
            if len(pair) == 2:
                one, two = pair
                along = (micro - one) / (two - one)
                at = [a + (b - a) * along for a, b in zip(known[one], known[two], strict=True)]
                size, seconds = max(size, at[0]), max(seconds, at[1])
        return size, seconds if self._convex else 0.0

    def _plan(self, candidate: Candidate) -> Candidate:
        branch, setting = candidate.branch, candidate.setting
        if self._rates is None:
            plan = branch.planner.plan(setting, self._rooms)
            if plan.total is None:
                raise ConfigError(plan.note)
            if plan.fits is None and plan.note:
                raise UsageError(plan.note)
            return replace(candidate, plan=plan)
        found, computing = self._timed(branch, branch.planner, setting)
        plan = branch.planner.plan(setting, self._rooms)
        activations = plan.peaks.get(Category.ACTIVATIONS.value, 0)
        self._passes.setdefault(branch.passes, {}).setdefault(setting.micro_batch, (activations, computing))
        return replace(candidate, plan=plan, time=found)

    def _timed(self, branch: Branch, planner: Planner, setting: Setting) -> tuple[StepTime, float]:
        """Return the time of a step, and the seconds that the operators with FLOPs of a micro-batch take."""
        if isinstance(planner, DeepPlanner):
            few, more = (self._timed(branch, each, setting) for each in (planner.few, planner.more))
            return planner.deep(few[0], more[0]), planner.deep(few[1], more[1])
        assert self._rates is not None
        costs = self._rates.costs(branch.ranks)
        recorder = Recorder(chunks=not costs.asynchronous)
        found = plan_time(planner, setting, self._rates, self._limit, recorder).time
        # Operators without FLOPs differ by stage.
        operators = [one for _, one in recorder.passes[0].events if isinstance(one, Operator) and one.flops]
        return found, sum(map(costs.operator, operators))
