"""Plans of all positions of a pipeline in one process: stages, memory, and the simulated idle time of the schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from shardwise.engine.pipeline_dryrun import StageForms, with_stages
from shardwise.engine.stages import PipelineRanks, as_pipeline, recompute_as_configured
from shardwise.pipeline.actions import INPUT_GRADIENT, Op, Schedule
from shardwise.pipeline.lowering import with_sharding
from shardwise.pipeline.module import PipelineModule
from shardwise.pipeline.schedules import make_schedule, placement_of
from shardwise.pipeline.simulator import simulate
from shardwise.precision.dtypes import policy_from_config

if TYPE_CHECKING:
    from shardwise.config import Resolution


def requested_stages(model: nn.Module) -> int | None:
    """Return the ranks of a pipeline that a model asks for; None: as configured."""
    return model.num_stages if isinstance(model, PipelineModule) else None


@dataclass(frozen=True)
class ScheduleFacts:
    """Stages and simulated idle time of a pipeline, by position.

    Attributes:
        name: of the schedule.
        micro_batches: number of micro-batches in a step.
        layers: layers of the position's stages.
        parameters: numbers of parameter elements.
        in_flight: most stages' activations at a time, of one micro-batch each.
        idle: idle share of a step, if all stages take equal times.
        idle_by_flops: the same, if times are in proportion to FLOPs; None: FLOPs are unknown without a batch.
        all_gathered: by `pipeline.unsharded_for`, bytes of parameters that ZeRO stage 3 receives in a step.
    """

    name: str
    micro_batches: int
    layers: tuple[str, ...]
    parameters: tuple[int, ...]
    in_flight: tuple[int, ...]
    idle: tuple[float, ...]
    idle_by_flops: tuple[float, ...] | None
    all_gathered: dict[str, tuple[int, ...]]


class PipelinePlans:
    """The positions of a pipeline on ranks that are not there.

    Attributes:
        forms: of the values between stages.
    """

    def __init__(self, model: PipelineModule, resolution: Resolution, ranks: int, positions: int) -> None:
        self._pipeline = resolution.config.pipeline
        dtype = policy_from_config(resolution.config).compute_dtype or torch.float32
        self._itemsize = dtype.itemsize
        self._steps = int(resolution.config.gradient_accumulation_steps or 1)
        rank_of = placement_of(self._pipeline.schedule, positions, self._pipeline.chunks)
        size = ranks // positions
        self._places = [PipelineRanks.of(place * size, ranks, positions, rank_of) for place in range(positions)]
        recompute_as_configured(model, self._pipeline)
        self._models = [with_stages(model, place.stages, len(rank_of)) for place in self._places]
        self.forms = StageForms(model, len(rank_of))

    @classmethod
    def of(cls, model: nn.Module, resolution: Resolution, ranks: int) -> PipelinePlans | None:
        """Return the positions of a configured pipeline; None without one."""
        config = resolution.config.pipeline
        positions = 1 if config.stages == "auto" else int(config.stages)
        if not isinstance(model, PipelineModule):
            if positions == 1:
                return None
            model = as_pipeline(model, config.partition, None)
        return cls(model, resolution, ranks, positions)

    def positions(self) -> Iterator[tuple[PipelineModule, PipelineRanks]]:
        """Yield the model and the place of each position."""
        yield from zip(self._models, self._places, strict=True)

    @property
    def schedule(self) -> Schedule:
        """The schedule of a step."""
        first, positions = self._places[0], len(self._places)
        chunks = len(first.rank_of) // positions
        return make_schedule(self._pipeline.schedule, positions, self._steps, chunks, first.placement)

    def messages(self) -> list[tuple[tuple[int, int], int]]:
        """Return sender, receiver and bytes of the messages between stages, after the plans have been made."""
        place = self._places[0]
        ranks = [place.ranks[position] for position in place.rank_of]
        return [((ranks[stage], ranks[stage + 1]), size) for stage, size in self.forms.sizes.items()]

    def facts(self) -> ScheduleFacts:
        """Return stages and idle time, after the plans have been made."""
        name, schedule = self._pipeline.schedule, self.schedule
        simulation = simulate(schedule)
        by_flops = simulate(schedule, self.forms.times).idle if any(self.forms.flops) else None
        return ScheduleFacts(
            name,
            self._steps,
            tuple(
                ", ".join(model.layers_of(stage).partition(" ")[2] for stage in place.stages)
                for model, place in self.positions()
            ),
            tuple(sum(p.numel() for p in model.parameters()) for model in self._models),
            tuple(round(peak) for peak in simulation.peak),
            simulation.idle,
            by_flops,
            {value: self._all_gathered(schedule, value) for value in ("pass", "run", "step")},
        )

    def _all_gathered(self, schedule: Schedule, unsharded_for: str) -> tuple[int, ...]:
        found = []
        for (model, place), actions in zip(
            self.positions(), with_sharding(schedule, unsharded_for).actions, strict=True
        ):
            ranks = len(place.stage_ranks[0])
            # A computation of gradients of weights reads no parameters.
            counted = {Op.FORWARD} | INPUT_GRADIENT if unsharded_for == "pass" else {Op.UNSHARD}
            times = Counter(action.stage for action in actions if action.op in counted)
            sizes = {s: sum(p.numel() for p in model.stage(s).parameters()) for s in place.stages}
            elements = sum(sizes[stage] * count for stage, count in times.items())
            found.append(elements * self._itemsize * (ranks - 1) // ranks)
        return tuple(found)
