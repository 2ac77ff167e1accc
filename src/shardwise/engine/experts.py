"""Expert parallelism of an engine's model, set up before sharding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn

from shardwise.errors import UsageError
from shardwise.moe import ExpertGroup, bind_experts
from shardwise.moe.exchange import ExpertParallelModule
from shardwise.moe.huggingface import convert
from shardwise.moe.layer import MoE
from shardwise.parallel.sequence import across
from shardwise.zero.parameters.init import PartStore, whole_values
from shardwise.zero.units.released import disown, owner_of

if TYPE_CHECKING:
    from shardwise.comm.communicator import Communicator
    from shardwise.config import Config
    from shardwise.engine.ranks import RankGrid


def divide_experts(model: nn.Module, config: Config, comm: Communicator, lines: RankGrid) -> dict[int, ExpertGroup]:
    """Create the expert-parallel groups, by size, and declare each rank's experts (all ranks call). Ranks with the same
    index in their tensor-parallel groups share experts.
    """
    if config.expert_parallel.enabled:
        convert(model, config.expert_parallel)
    return bind_experts(
        model,
        comm,
        replicas=across(lines.tensor),
        data_first=config.use_data_before_expert_parallelism,
        prepare=None if comm.imagined else _make_whole,
    )


def release_experts(model: nn.Module, groups: Mapping[int, ExpertGroup]) -> None:
    """Remove closed expert-parallel groups from the layers that still refer to them."""
    for layer in model.modules():
        if isinstance(layer, ExpertParallelModule) and layer.group in groups.values():
            layer.group = None


def _make_whole(layer: ExpertParallelModule) -> None:
    """Unshard experts that were built under zero.Init, because ranks have different experts from here on."""
    if layer.ep_size == 1:
        return
    experts = layer.deepspeed_moe.experts if isinstance(layer, MoE) else layer
    for name, parameter in experts.named_parameters():
        if parameter.is_meta:
            raise UsageError(
                f"{name} of {type(layer).__name__} is on the meta device: experts that are divided over ranks need "
                "their values before shardwise.initialize(). Build the model on a CPU or device, or under zero.Init"
            )
        built = isinstance(owner_of(parameter), PartStore)
        if not built or not isinstance(layer, MoE) or layer.listed:
            continue
        values, _ = whole_values(parameter)
        disown(parameter)
        parameter.data = values.to(parameter.device)
