"""Planned time of a step on a measured machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from shardwise.engine.plans import Offload, planners_of
from shardwise.errors import UsageError
from shardwise.plan.clock import Costs, StepTime, step_time
from shardwise.plan.events import Launch, Operator, Recorder
from shardwise.plan.rates import Collectives, Machine, Operators, measure_operators


@dataclass(frozen=True)
class TimePlan:
    """The time of a step at a ZeRO stage; `estimated`: share of the computing of operators that were not measured."""

    stage: int
    time: StepTime
    estimated: float


def plan_times(
    model: nn.Module,
    config: dict[str, Any],
    machine: Machine,
    *,
    ranks: int,
    stages: Sequence[int],
    batch: Any,
    limit: float = 0.0,
) -> list[TimePlan]:
    """Return the planned time of a step at each stage, where all ranks share the machine.

    Args:
        model: parameters may be on the meta device.
        batch: a micro-batch, real or on the meta device.
        limit: seconds in which operators that `machine` lacks are measured here, and added to it.

    Raises UsageError for pipelines and state on a disk, and if the machine was not measured with so many ranks.
    """
    (planner, *others), _ = planners_of(model, config, ranks, batch)
    if others or planner.target.place is not None:
        raise UsageError("the time of pipelines is not planned yet; `shardwise plan --pp` shows their idle share")
    if "nvme" in Offload.of(planner.target.resolution.config).devices:
        raise UsageError("the time of reading and writing state on a disk is not planned yet; leave --time out")
    setting = planner.target.setting
    found = []
    for stage in stages:
        recorder = Recorder()
        planner.record(replace(setting, stage=stage), recorder)
        events = [event for one in recorder.passes for _, event in one.events]
        missing = {e.signature: e for e in events if isinstance(e, Operator) and e.signature not in machine.operators}
        if limit and missing:
            calls = {signature: recorder.calls[signature] for signature in missing}
            machine.operators |= measure_operators(calls, missing, torch.device("cpu"), limit)
        unknown = {(e.op, e.ranks) for e in events if isinstance(e, Launch)}
        unknown -= {(one.op, one.ranks) for one in machine.collectives}
        if unknown:
            op, count = min(unknown)
            raise UsageError(
                f"{op} of {count} ranks was not measured. Run `shardwise bench machine --nproc {ranks}` on the machine"
            )
        crowd = machine.crowd(ranks)
        operators = Operators(machine.operators, crowd)
        costs = Costs(
            operator=operators.seconds,
            collective=Collectives(machine.collectives).seconds,
            host=machine.host,
            interference=machine.interference,
            asynchronous=machine.device != "cpu",
        )
        time = step_time(recorder.passes, setting.accumulation, costs)
        found.append(TimePlan(stage, time, operators.estimated / time.computing if time.computing else 0.0))
    return found
