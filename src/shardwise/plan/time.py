"""Planned time of a step on a measured machine, or on cards from data sheets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from shardwise.engine.plans import Offload, Planner, Setting, planners_of
from shardwise.errors import UsageError
from shardwise.plan.clock import Costs, Rates, StepTime, step_time
from shardwise.plan.events import Recorder


@dataclass(frozen=True)
class TimePlan:
    """The time of a step at a ZeRO stage; `estimated`: share of the computing of operators that were not measured."""

    stage: int
    time: StepTime
    estimated: float

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON values: seconds and bytes."""
        took = self.time
        names = ("total", "computing", "communicating", "waiting", "host", "estimated")
        return {
            "stage": self.stage,
            **{name: getattr(took, name) for name in names},
            "phases": dict(took.phases),
            "collectives": [
                {"op": op, "group": group, "link": took.links[op, group] or None, "seconds": seconds, "sent": sent}
                for (op, group), seconds in took.collectives.items()
                for sent in [took.sent[op, group]]
            ],
        }


def plan_times(
    model: nn.Module,
    config: dict[str, Any],
    rates: Rates,
    *,
    ranks: int,
    stages: Sequence[int],
    batch: Any,
    limit: float = 0.0,
    slowest: float = 1.0,
    optimizer: Any = None,
    model_parameters: Iterable[Any] | None = None,
) -> list[TimePlan]:
    """Return the planned time of a step at each stage.

    Args:
        model: parameters may be on the meta device.
        batch: a micro-batch, real or on the meta device.
        rates: a measured `Machine` that all ranks share, or a `Cluster` from data sheets.
        limit: seconds in which operators that a machine's rates lack are measured here, and added to them.
        slowest: one rank takes so many times as long to compute as the others, which wait for it.
        optimizer, model_parameters: as of `shardwise.initialize`.

    Raises UsageError for pipelines and state on a disk, and if the rates lack something.
    """
    if not slowest >= 1:
        raise UsageError(f"the slowest rank takes 1 time or more as long as the others, not {slowest}")
    (planner, *others), _ = planners_of(model, config, ranks, batch, optimizer, model_parameters)
    if others or planner.target.place is not None:
        raise UsageError("the time of pipelines is not planned yet; `shardwise plan --pp` shows their idle share")
    if "nvme" in Offload.of(planner.target.resolution.config).devices:
        raise UsageError("the time of reading and writing state on a disk is not planned yet; leave --time out")
    setting = planner.target.setting
    return [plan_time(planner, replace(setting, stage=stage), rates, limit, slowest) for stage in stages]


def plan_time(planner: Planner, setting: Setting, rates: Rates, limit: float = 0.0, slowest: float = 1.0) -> TimePlan:
    """Return the planned time of a step of one rank; see `plan_times`."""
    recorder = Recorder()
    planner.record(setting, recorder)
    rates.complete(recorder, setting.ranks, limit)
    time = step_time(recorder.passes, setting.accumulation, slowed(rates.costs(setting.ranks), slowest))
    return TimePlan(setting.stage, time, time.estimated / time.computing if time.computing else 0.0)


def slowed(costs: Costs, factor: float) -> Costs:
    """Return the costs of a rank that takes `factor` times as long to compute."""
    operator = costs.operator
    return replace(costs, operator=lambda one: factor * operator(one))
