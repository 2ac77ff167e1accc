"""Describes the collectives of tensor, sequence and expert parallelism in each pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from shardwise.moe.exchange import ExpertParallelModule
from shardwise.parallel.attention import DistributedAttention
from shardwise.parallel.ring import RingAttention
from shardwise.parallel.tensor.layers import NormParallel, Parallel, RowParallel
from shardwise.registry import part_of

if TYPE_CHECKING:
    from shardwise.engine.ranks import RankGrid


def exchanges_in_backward(model: nn.Module, lines: RankGrid) -> bool:
    """Return True if other ranks wait for gradients from this rank's backward pass (after sharding)."""
    if len(lines.sequence[0]) > 1 or any(part_of(parameter).ranks is not None for parameter in model.parameters()):
        return True
    return any(
        isinstance(module, (nn.SyncBatchNorm, DistributedAttention, RingAttention)) for module in model.modules()
    )


def exchanges_of(model: nn.Module, lines: RankGrid) -> str:
    """Describe the collectives of a forward and backward pass besides ZeRO's; "" without other parallelism."""
    tensor, sequence = len(lines.tensor[0]), len(lines.sequence[0])
    modules = list(model.modules())
    divided = sum(isinstance(module, Parallel) for module in modules)
    rows = sum(isinstance(module, RowParallel) for module in modules)
    norms = sum(isinstance(module, NormParallel) for module in modules)
    said = []
    if divided:
        how = f"{rows} all-reduces of outputs"
        if norms:
            how = f"{norms} all-gathers behind norms and {rows} reduce-scatters of outputs"
        said.append(f"tensor-parallel size {tensor}: {how} forward, as many backward")
    if sequence > 1:
        said.append(f"sequence-parallel size {sequence}: 4 all-to-alls an attention forward, 4 backward")
    for size in sorted(
        {module.ep_size for module in modules if isinstance(module, ExpertParallelModule) and module.ep_size > 1}
    ):
        count = sum(isinstance(module, ExpertParallelModule) and module.ep_size == size for module in modules)
        said.append(f"expert-parallel size {size}: 2 all-to-alls in each of {count} layers forward, 2 backward")
    if not said:
        return ""
    return "; ".join([f"data-parallel size {len(lines.data[0])}", *said])
