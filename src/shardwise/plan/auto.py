"""Values that a configuration leaves to "auto" and only a plan can choose: the ZeRO stage, the tiers of state, and the
micro-batch. One rank plans, and all take what it has chosen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardwise.config import Resolution
from shardwise.engine.choice import DEVICES, MICRO, STAGE, STEPS, micro_is_open
from shardwise.engine.dryrun import MemoryPlan
from shardwise.engine.plans import MARGIN, Offload, PlanningTarget, Room, Setting, offloads, target_of
from shardwise.engine.preflight import Check, Resource, checks_of, resources_of
from shardwise.errors import ConfigError, UsageError
from shardwise.memory import OutOfMemoryError, Tier
from shardwise.plan.layers import deep_planner
from shardwise.plan.rates import Machine
from shardwise.plan.script import accepted
from shardwise.plan.search import Branch, Candidate, Search, in_words, search
from shardwise.trees import tensors_in
from shardwise.units import format_size
from shardwise.zero.units.plan import TABLE

if TYPE_CHECKING:
    from torch import nn

    from shardwise.comm.communicator import Communicator
    from shardwise.config import Config
    from shardwise.config.schema.tuning import CostBudget

_KINDS: dict[str, type[Exception]] = {"memory": OutOfMemoryError, "config": ConfigError, "usage": UsageError}
_FAILED = 'initialize(): rank 0 could not plan what is "auto"; write the values'
_MOST_TRIED = 10
"""Settings that a plan of the shallow model takes for fitting, and that of the whole model may refuse."""


def choose(
    resolution: Resolution,
    model: nn.Module,
    job: Communicator,
    *,
    optimizer: Any = None,
    parameters: Sequence[Any] | None = None,
    sample: Any = None,
) -> tuple[dict[str, Any], str]:
    """Return values of open keys by their paths, and the reason (all ranks call).

    Args:
        optimizer, parameters: as of `initialize`.
        sample: a batch of one or more samples; None: activations are not known.

    Raises, on all ranks:
        OutOfMemoryError: no setting fits. The message has the least that is needed.
        ConfigError: the training would cost more than `cost_budget`.
        UsageError: something cannot be chosen without a sample, without rates, or because planning raised an error.
    """
    target = target_of(model, resolution, job.world, device=job.device, optimizer=optimizer, parameters=parameters)
    checks = _checks(target, job)
    found: Any = None
    cause: Exception | None = None
    if job.rank == 0:
        try:
            found = "found", *_chosen(target, checks, sample)
        except Exception as error:  # the other ranks wait for the result
            name = next((name for name, kind in _KINDS.items() if isinstance(error, kind)), None)
            found = (name, str(error)) if name else ("usage", f"{_FAILED} ({type(error).__name__}: {error})")
            cause = error
    shared: Any = job.share_object(found, "auto")
    kind, *rest = shared
    if kind != "found":
        raise _KINDS[kind](rest[0]) from cause
    return rest[0], rest[1]


def _checks(target: PlanningTarget, job: Communicator) -> list[Check]:
    """Return the limited resources of all ranks."""
    own = [vars(one) for one in resources_of(target, job.rank, job.nodes()[job.rank])]
    gathered = [[Resource(**one) for one in each] for each in job.exchange(own, "auto")]
    nothing = MemoryPlan({}, 0, {}, 0, {tier.value: 0 for tier in Tier}, 0, {}, {})
    return checks_of(gathered, [nothing] * job.world)


def _chosen(target: PlanningTarget, checks: Sequence[Check], sample: Any) -> tuple[dict[str, Any], str]:
    resolution, now = target.resolution, target.setting
    budget = resolution.config.cost_budget
    if sample is None and budget.rates is not None:
        raise UsageError(
            "cost_budget.rates: the time of a step is planned for a batch. Pass initialize(sample_batch=...), or "
            "training_data"
        )
    if sample is not None:
        rows = next((len(tensor) for tensor in tensors_in(sample) if tensor.dim()), 0)
        if not rows:
            raise UsageError("initialize(sample_batch=...): it has no tensor with a dimension of samples")
        target = replace(target, setting=replace(now, micro_batch=rows))
        sample = accepted(target.module, sample)
    rates = None if budget.rates is None else Machine.load(budget.rates)
    rooms = list(dict.fromkeys(check.room for check in checks))
    tries = [(sample, True), (sample, False), *([(None, True)] if rates is None else [])]
    missing = "" if sample is not None else "activations are not in it, pass initialize(sample_batch=...)"
    for batch, deep in tries:
        best, result = _best(target, now, batch, rooms, rates, deep=deep)
        if best is not None or not result.unknown:
            break
        missing = result.unknown
    if best is None:
        raise _refusal(result, checks)
    if budget.amount is not None:
        _check_cost(best, budget)
    missing = "" if batch is not None else f"; {missing}"
    return dict(_values(resolution, best.setting, batch)), _reason(best, result, checks, budget) + missing


def _best(
    target: PlanningTarget, now: Setting, sample: Any, rooms: Sequence[Room], rates: Machine | None, *, deep: bool
) -> tuple[Candidate | None, Search]:
    """Return the best setting by a plan of the whole model, and the search; `deep`: search with shallow models."""
    resolution = target.resolution
    branch, whole = (Branch(deep_planner(target, sample, deep=each), now.ranks) for each in (deep, False))
    space = _space(branch, resolution, now, open_micro=sample is not None and micro_is_open(resolution))
    result = search(space, rooms, rates)
    for candidate in result.ranking[:_MOST_TRIED]:
        confirmed = search([replace(candidate, branch=whole)], rooms, rates)
        if confirmed.ranking:
            return confirmed.ranking[0], result
        result.unknown = result.unknown or confirmed.unknown
    return None, result


def _space(branch: Branch, resolution: Resolution, now: Setting, *, open_micro: bool) -> Iterator[Candidate]:
    """Yield the settings of which one is chosen; what is not open stays as configured."""
    configured, autos = Offload.of(resolution.config), resolution.autos
    stages = TABLE if STAGE in autos else [now.stage]
    open_tiers = [path in autos for path in DEVICES]
    samples = now.micro_batch * now.accumulation
    for way in offloads(configured.path, nested=False):
        if any(
            not free and own != was for free, own, was in zip(open_tiers, way.devices, configured.devices, strict=True)
        ):
            continue
        if "nvme" in way.devices and not _has_path(resolution.config):
            continue
        for stage in stages:
            if stage < way.stage or (stage > way.stage and now.ranks == 1 and len(stages) > 1):
                continue
            for micro in range(samples, 0, -1) if open_micro else [now.micro_batch]:
                if samples % micro == 0:
                    changed = replace(now, stage=stage, micro_batch=micro, accumulation=samples // micro, offload=way)
                    yield Candidate(branch, changed)


def _has_path(config: Config) -> bool:
    zero = config.zero_optimization
    sections = (zero.offload_optimizer, zero.offload_param)
    return any(one is not None and one.nvme_path for one in sections)


def _values(resolution: Resolution, setting: Setting, sample: Any) -> Iterator[tuple[str, Any]]:
    assert setting.offload is not None
    for path, value in ((STAGE, setting.stage), *zip(DEVICES, setting.offload.devices, strict=True)):
        if path in resolution.autos:
            yield path, value
    if sample is not None and micro_is_open(resolution):
        yield MICRO, setting.micro_batch
        yield STEPS, setting.accumulation


def _reason(best: Candidate, result: Search, checks: Sequence[Check], budget: CostBudget) -> str:
    plan = best.plan
    assert plan is not None
    order = f"the fastest by {budget.rates}" if best.time is not None else "the cheapest in tiers and bytes sent"
    limits = ", ".join(dict.fromkeys(f"{format_size(check.room.size)} a rank: {check.limit}" for check in checks))
    took = "" if best.time is None else f", {1e3 * best.time.total:.0f} ms a step"
    return (
        f"{order} of {result.settings} settings that fits with {MARGIN:.0%} to spare: {format_size(plan.total)} "
        f"planned{took} ({limits or 'no limit is known'})"
    )


def _refusal(result: Search, checks: Sequence[Check]) -> Exception:
    if result.smallest is None and result.refused:
        return UsageError(f'initialize(): no setting for what is "auto" can be planned. {in_words(result)}')
    rooms = "; ".join(f"{format_size(check.room.size)} for each rank ({check.limit})" for check in checks)
    return OutOfMemoryError(
        f'initialize(): of {result.settings} settings for what is "auto" none fits into {rooms}. {in_words(result)}'
    )


def _check_cost(best: Candidate, budget: CostBudget) -> None:
    assert best.time is not None and budget.steps is not None and budget.amount is not None
    cost = budget.steps * best.time.total / 3600 * best.branch.ranks * budget.rank_hour
    if cost > budget.amount:
        raise ConfigError(
            f"cost_budget.amount: {budget.steps} steps of {best.time.total:.3g} s on {best.branch.ranks} ranks at "
            f"{budget.rank_hour:g} an hour cost {cost:.4g}, by rates of {budget.rates}, and that is the fastest that "
            f"fits. {budget.amount:g} pay for {int(budget.steps * budget.amount / cost)} steps"
        )
