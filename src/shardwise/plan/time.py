"""Planned time of a step on a measured machine, or on cards from data sheets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from shardwise.engine.pipeline_plans import PipelinePlans
from shardwise.engine.plans import MemoryPlans, Offload, Planner, Room, Setting, SettingPlan, planners_of, plans_of
from shardwise.errors import UsageError
from shardwise.plan.clock import Costs, Rates, StepTime, step_time
from shardwise.plan.events import Launch, Operator, Pass, Recorder, UnitWork
from shardwise.plan.pipelines import pipeline_time
from shardwise.precision.dtypes import policy_from_config
from shardwise.trees import tensors_in
from shardwise.zero.units.plan import TABLE


@dataclass(frozen=True)
class TimePlan:
    """The time of a step at a ZeRO stage, of the rank of a pipeline that is busy longest.

    Attributes:
        estimated: share of the computing of operators that were not measured.
        samples: of all ranks in a step; `tokens`: in these, if they are sequences.
        ranks: of the job.
        share_of_peak: FLOPs, recomputed ones too, as share of what the cards' data sheets allow; None: unknown.
        idle: of a pipeline, the share of the step in which each of its ranks computes nothing; mean of all: the bubble.
    """

    stage: int
    time: StepTime
    estimated: float
    samples: int
    tokens: int
    ranks: int
    share_of_peak: float | None = None
    idle: tuple[float, ...] = ()

    def cost(self, price: float) -> float:
        """Return what a step costs at a price for an hour of a card."""
        return price * self.ranks * self.time.total / 3600

    def as_dict(self, price: float | None = None) -> dict[str, Any]:
        """Return plain JSON values: seconds and bytes, and with a price the cost of a step."""
        took = self.time
        names = ("total", "computing", "communicating", "waiting", "host", "estimated", "transfers", "moved")
        return {
            "stage": self.stage,
            **{name: getattr(took, name) for name in names},
            "flops": dict(took.flops),
            "samples": self.samples,
            "tokens": self.tokens,
            "cost": None if price is None else self.cost(price),
            "share_of_peak": self.share_of_peak,
            "idle": list(self.idle),
            "phases": dict(took.phases),
            "units": {unit: asdict(work) for unit, work in took.units.items()},
            "collectives": [
                {"op": op, "group": group, "link": took.links[op, group] or None, "seconds": seconds, "sent": sent}
                for (op, group), seconds in took.collectives.items()
                for sent in [took.sent[op, group]]
            ],
        }


def plan_times(model: nn.Module, config: dict[str, Any], rates: Rates, **given: Any) -> list[TimePlan]:
    """Return the planned time of a step at each stage; arguments as `plan_steps`."""
    return plan_steps(model, config, rates, **given)[1]


def plan_steps(
    model: nn.Module,
    config: dict[str, Any],
    rates: Rates,
    *,
    ranks: int,
    stages: Sequence[int],
    batch: Any,
    rooms: Sequence[Room] = (),
    limit: float = 0.0,
    slowest: float = 1.0,
    disk: tuple[float, float] | None = None,
    **client: Any,
) -> tuple[MemoryPlans, list[TimePlan]]:
    """Return the planned memory, as `plan_model`, and the planned time of a step at each stage, of one dry run.

    Args:
        model: parameters may be on the meta device.
        batch: a micro-batch, real or on the meta device.
        rates: a measured `Machine` that all ranks share, or a `Cluster` from data sheets.
        rooms: bytes available to one rank.
        limit: seconds in which operators that a machine's rates lack are measured here, and added to them.
        slowest: one rank takes so many times as long to compute as the others, which wait for it.
        disk: bytes/s that a rank reads from its disk and writes to it; None: those of the rates.
        client: other arguments of `planners_of`.

    Offloaded state moves while the backward pass runs; what takes longer is added. The host updates the state of an
    offloaded optimizer.

    Raises UsageError if the rates lack something, or the model cannot run on fake tensors.
    """
    if not slowest >= 1:
        raise UsageError(f"the slowest rank takes 1 time or more as long as the others, not {slowest}")
    if batch is None:
        raise UsageError("a plan of time needs a batch")
    planners, pipeline = planners_of(model, config, ranks, batch, **client)
    setting = planners[0].target.setting
    memory: list[SettingPlan] = []
    times = []
    for stage in stages:
        planned, time = _planned(
            planners, pipeline, replace(setting, stage=stage), rates, rooms, limit=limit, slowest=slowest, disk=disk
        )
        memory += planned
        times.append(time)
    return plans_of(memory, rooms, pipeline), times


def plan_time(
    planner: Planner, setting: Setting, rates: Rates, limit: float = 0.0, recorder: Recorder | None = None
) -> TimePlan:
    """Return the planned time of a step of one rank without a pipeline; see `plan_steps`. `recorder`: records it."""
    recorders = [] if recorder is None else [recorder]
    return _planned([planner], None, setting, rates, recorders=recorders, limit=limit, slowest=1.0)[1]


def _planned(
    planners: Sequence[Planner],
    pipeline: PipelinePlans | None,
    setting: Setting,
    rates: Rates,
    rooms: Sequence[Room] = (),
    *,
    recorders: Sequence[Recorder] = (),
    limit: float,
    slowest: float,
    disk: tuple[float, float] | None = None,
) -> tuple[list[SettingPlan], TimePlan]:
    offload = setting.offload or Offload.of(planners[0].target.resolution.config)
    disk = disk or rates.disk
    if "nvme" in offload.devices and disk is None:
        raise UsageError(
            "how fast the disk is was not measured; `shardwise plan --disk-speed` takes what `shardwise bench io` finds"
        )
    ranks = setting.ranks * setting.pipeline
    if rates.host_link is None and set(offload.devices) != {"none"} and rates.costs(ranks).asynchronous:
        raise UsageError(
            "the time of offloaded state was not measured: `shardwise bench machine` on a GPU measures neither the "
            "host nor its link to the GPU. Plan from data sheets (--card), or without offload_optimizer and "
            "offload_param"
        )
    on_cpu = not rates.costs(ranks).asynchronous
    recorders, planned = recorders or [Recorder(by_unit=True, chunks=on_cpu) for _ in planners], []
    for planner, recorder in zip(planners, recorders, strict=True):
        planned.append(planner.plan(setting, rooms, recorder))
        if planned[-1].note:
            raise UsageError(f"no time of {setting} can be planned: {planned[-1].note}")
        rates.complete(recorder, ranks, limit)
    passes = [one.passes for one in recorders]
    if offload.optimizer != "none":
        passes = [[stepped_on_host(one) for one in each] for each in passes]
    costs = rates.costs(ranks)
    slow = slowed(costs, slowest) if slowest > 1 else costs
    idle: tuple[float, ...] = ()
    if pipeline is None:
        time = step_time(passes[0], setting.accumulation, slow)
        positions = [time]
    else:
        between = [Launch(0, "broadcast", "pipeline", 2, *given, 0, "") for given in pipeline.messages()]
        time, idle, positions = pipeline_time(pipeline.schedule, between, passes, costs, slow)
        time.units = defaultdict(UnitWork)
        for one in positions:
            for unit, work in one.units.items():
                time.units[unit].add(work)
    samples = setting.config["train_batch_size"]
    together = zip(planned, planners, strict=True)
    _add_transfers(
        time, max(_transfers(plan.moved, planner, setting, offload, rates, disk) for plan, planner in together)
    )
    return planned, TimePlan(
        setting.stage,
        time,
        time.estimated / time.computing if time.computing else 0.0,
        samples,
        samples * _length(planners[0].batch) * setting.sequence,
        ranks,
        _share_of_peak(positions, time.total, rates.peaks),
        idle,
    )


def stepped_on_host(one: Pass) -> Pass:
    """Return a pass whose update the host computes."""
    phases = {
        phase: [
            replace(event, on_host=True) if phase == "step" and isinstance(event, Operator) else event
            for event in events
        ]
        for phase, events in one.phases.items()
    }
    return replace(one, phases=phases)


def _length(batch: Any) -> int:
    """Return the tokens of a sample: of token ids, or of sequences of vectors; 1 for other samples."""
    first = next(iter(tensors_in(batch)), None)
    if first is None:
        return 1
    sequences = first.dim() == 3 if first.is_floating_point() else first.dim() >= 2
    return first.shape[1] if sequences else 1


def _share_of_peak(positions: Sequence[StepTime], total: float, peaks: Mapping[str, float]) -> float | None:
    if not peaks:
        return None
    least = (sum(flops / peaks[dtype] for dtype, flops in one.flops.items()) for one in positions)
    return sum(least) / len(positions) / total


def _transfers(
    moved: dict[str, dict[str, int]],
    planner: Planner,
    setting: Setting,
    offload: Offload,
    rates: Rates,
    disk: tuple[float, float] | None,
) -> float:
    """Return the seconds in which a step's bytes go between tiers."""
    seconds = 0.0
    if "disk" in moved and disk is not None:
        seconds += moved["disk"]["read"] / disk[0] + moved["disk"]["written"] / disk[1]
    if rates.host_link is not None:
        seconds += between_card_and_host(planner, setting, offload) / rates.host_link
    return seconds


def between_card_and_host(planner: Planner, setting: Setting, offload: Offload) -> float:
    """Return the bytes of a step; the dry run has none, because its device is the host. Gradients of a rank's shard go
    to an offloaded optimizer, and parameters come back; offloaded parameters come for each forward and backward pass.
    """
    target = planner.target
    config = target.resolution.config
    policy = policy_from_config(config)
    parameters = list(target.module.parameters())
    shard = sum(one.numel() for one in parameters if one.requires_grad) / setting.ranks
    itemsize = (policy.compute_dtype or torch.float32).itemsize
    size = 0.0
    if offload.optimizer != "none":
        section = config.zero_optimization.offload_optimizer
        times = setting.accumulation if TABLE[setting.stage].gradients else 1
        size += (
            (1.0 if section is None else section.ratio) * shard * (times * policy.accumulate_dtype.itemsize + itemsize)
        )
    if offload.parameters != "none":
        whole = sum(one.numel() for one in parameters) / setting.ranks
        size += 2 * setting.accumulation * whole * itemsize
    return size


def _add_transfers(time: StepTime, seconds: float) -> None:
    """Count transfers, which the backward pass hides up to its length."""
    if not seconds:
        return
    shown = max(0.0, seconds - time.phases["backward"])
    time.transfers = seconds
    time.phases["transfers"] = shown
    time.total += shown


def slowed(costs: Costs, factor: float) -> Costs:
    """Return the costs of a rank that takes `factor` times as long to compute."""
    operator = costs.operator
    return replace(costs, operator=lambda one: factor * operator(one))
