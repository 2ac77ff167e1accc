"""Ranks of a pipeline, and the stages that are built on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise.comm.communicator import check_agreement
from shardwise.errors import PipelineError
from shardwise.pipeline.actions import Op
from shardwise.pipeline.layers import SpecLayers
from shardwise.pipeline.module import PipelineModule
from shardwise.pipeline.partition import LayerCost
from shardwise.recompute import checkpoint
from shardwise.registry import declare_part
from shardwise.zero.passes.reduce import CopiesElsewhere

if TYPE_CHECKING:
    from shardwise.comm.communicator import Communicator
    from shardwise.config.schema.parallel import Pipeline

WEIGHT_GRADIENTS = frozenset({Op.BACKWARD_WEIGHT})


@dataclass(frozen=True)
class PipelineRanks:
    """Position of a rank in its pipeline.

    Attributes:
        ranks: ranks of this pipeline in the job, by position.
        position: of this rank.
        stage_ranks: ranks of the job at each position: the pass groups.
        rank_of: position of each stage.
    """

    ranks: Sequence[int]
    position: int
    stage_ranks: Sequence[Sequence[int]]
    rank_of: Sequence[int]

    @classmethod
    def of(cls, rank: int, world: int, positions: int, rank_of: Sequence[int]) -> PipelineRanks:
        """Return the position of a rank where the ranks at one position are consecutive."""
        size = world // positions
        lines = [list(range(place * size, (place + 1) * size)) for place in range(positions)]
        return cls([line[rank % size] for line in lines], rank // size, lines, rank_of)

    @property
    def placement(self) -> str:
        """Name of the placement of stages."""
        return "v" if len(self.rank_of) > 1 and self.rank_of[-1] == self.rank_of[0] and len(self.ranks) > 1 else "loop"

    @property
    def stages(self) -> list[int]:
        """Stages of this rank."""
        return [stage for stage, position in enumerate(self.rank_of) if position == self.position]


def as_pipeline(model: nn.Module, partition: str, loss_fn: Callable[..., Any] | None) -> PipelineModule:
    """Return an ordinary model as a pipeline: an nn.Sequential, a model of transformers; a PipelineError for others.

    `partition` is `pipeline.partition` of the configuration.
    """
    if isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward:
        layers = SpecLayers(list(model), names=list(model._modules))
        return PipelineModule(layers, loss_fn=loss_fn, partition_method=partition)
    if any(kind.__module__.startswith("transformers.") for kind in type(model).__mro__):
        from shardwise.pipeline.huggingface import to_layers

        return PipelineModule(to_layers(model), loss_fn=loss_fn, partition_method=partition)
    raise PipelineError(
        f"`pipeline.stages` is set, and {type(model).__name__} is neither a shardwise.pipe.PipelineModule nor an "
        "nn.Sequential nor a model of transformers. Write it as layers, PipelineModule([LayerSpec(...), ...], "
        "loss_fn=...), pass each rank's part, PipelineModule.from_stages(module, loss_fn=...), or remove the key"
    )


def recompute_as_configured(model: PipelineModule, section: Pipeline) -> None:
    """Let stages recompute layers as the sections `pipeline` and `activation_checkpointing` say."""
    model.recompute.checkpoint = checkpoint
    if section.activation_checkpoint_interval:
        model.set_checkpoint_interval(section.activation_checkpoint_interval)


def build_stages(model: PipelineModule, place: PipelineRanks, job: Communicator) -> None:
    """Build this rank's stages; layer times are measured on rank 0, if they decide (all ranks call)."""
    if job.world > 1:
        check_agreement(job, model.description())
    costs = None
    if model.measures and job.world > 1:
        own = [asdict(cost) for cost in model.profile()] if job.rank == 0 else None
        shared = job.share_object(own, "pipeline_costs")
        assert isinstance(shared, list)
        costs = [LayerCost(**cost) for cost in shared]
    model.build(place.stages, len(place.rank_of), costs=costs)


def tie(model: PipelineModule, place: PipelineRanks, job: Communicator) -> dict[int, CopiesElsewhere]:
    """Declare the parameters that other positions have, too, and copy the first position's values (all ranks call)."""
    found: dict[int, CopiesElsewhere] = {}
    parts: dict[tuple[int, ...], Communicator] = {}
    for tied in model.tied_parameters():
        positions = tuple(sorted({place.rank_of[stage] for stage in tied.users}))
        if len(positions) == 1:
            continue
        lines = [[place.stage_ranks[p][n] for p in positions] for n in range(len(place.stage_ranks[0]))]
        if place.position not in positions:
            continue
        if positions not in parts:
            parts[positions] = job.part(lines, f"copies on positions {', '.join(map(str, positions))}")
        ranks = parts[positions]
        parameter = model.get_parameter(tied.name)
        what = f"{tuple(parameter.shape)} of {parameter.dtype}, trained: {parameter.requires_grad}"
        check_agreement(ranks, {f"the tied parameter {tied.name}": what})
        declare_part(parameter, ranks=range(len(place.stage_ranks[0])))
        values = parameter.detach().to(job.device)
        ranks.broadcast(values, 0, tied.name).wait()
        with torch.no_grad():
            parameter.copy_(values)
        found[id(parameter)] = CopiesElsewhere(ranks, place.position == positions[0])
    return found


def check_tied_groups(model: PipelineModule, copies: Mapping[int, CopiesElsewhere], optimizer: Any) -> None:
    """Raise a DesyncError if copies of a tied parameter have other optimizer settings: they would drift (all call)."""
    groups = [] if optimizer is None else optimizer.param_groups
    group_of = {id(parameter): group for group in groups for parameter in group["params"]}
    named = dict(model.named_parameters(remove_duplicate=False))
    facts: dict[Communicator, dict[str, str]] = {}
    for tied in model.tied_parameters():
        parameter = named.get(tied.name)
        copy = copies.get(id(parameter))
        if parameter is not None and copy is not None:
            group = group_of.get(id(parameter), {})
            plain = {key: _plain(group[key]) for key in sorted(group) if key not in ("params", "name", "param_names")}
            shown = f"trained: {parameter.requires_grad}, settings {plain}"
            facts.setdefault(copy.ranks, {})[f"optimizer group of the tied parameter {tied.name}"] = shown
    for ranks, found in facts.items():
        check_agreement(ranks, found)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
