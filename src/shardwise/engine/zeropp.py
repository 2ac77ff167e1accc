"""Lossy gradient reduction by configuration; for ZeRO++ (qgZ), also the ranks of each node."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import groupby
from typing import TYPE_CHECKING

import torch

from shardwise.comm.compression import BlockCode, Compressor, Feedback, Hops, QuantizedReduction
from shardwise.comm.compression.registry import build
from shardwise.comm.environment import discover
from shardwise.errors import ConfigError, LaunchError

if TYPE_CHECKING:
    from shardwise.comm.communicator import Communicator
    from shardwise.config import Config


def reduction(config: Config, comm: Communicator, hold: Callable[[torch.Tensor], None]) -> Compressor | None:
    """Return the configured lossy gradient reduction, or None (all ranks call); `hold` counts each buffer."""
    zero = config.zero_optimization
    if not zero.zero_quantized_gradients or comm.world == 1:
        return build(config, comm, hold)
    size = int(zero.zero_node_size) if zero.zero_node_size is not None else node_size(comm)
    hops = None
    if 1 < size < comm.world:
        hops = Hops(comm.run_of(size, "node"), comm.across_runs(size, "across_nodes"))
        hops.node.connect("reduce")
        hops.across.connect("reduce")
    loco = zero.zeropp_loco_param
    feedback = Feedback(loco.err_beta, int(loco.reset_T)) if loco is not None else None
    return QuantizedReduction(comm, BlockCode(4), hold, hops=hops, feedback=feedback)


def node_size(comm: Communicator) -> int:
    """Return the number of ranks of a node (all ranks call); a ConfigError unless it is the same for all nodes."""
    if comm.imagined:
        told = _told() or comm.world
        return comm.world if comm.world % told else told
    nodes = comm.nodes()
    runs = [(node, len(list(ranks))) for node, ranks in groupby(nodes)]
    sizes = [size for _, size in runs]
    if len(set(sizes)) > 1 or len({node for node, _ in runs}) < len(runs):
        raise ConfigError(
            "zero_optimization.zero_quantized_gradients: nodes must have as many ranks each, numbered node by node; "
            f"found runs of {', '.join(map(str, sizes))} ranks on {len(set(nodes))} nodes. Start as many ranks on each "
            "node, or set zero_optimization.zero_node_size to a size that divides all of these (1: no hop within nodes)"
        )
    return sizes[0]


def _told() -> int | None:
    try:
        return discover(os.environ).local_world_size
    except LaunchError:
        return None  # the script has created the process group
