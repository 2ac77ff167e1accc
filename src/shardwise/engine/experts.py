"""Experts of an engine's model: divided as its layers or the configuration say, before anything is sharded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from shardwise.moe import ExpertGroup, bind_experts

if TYPE_CHECKING:
    from shardwise.comm.communicator import Communicator
    from shardwise.config import Config


def divide_experts(model: nn.Module, config: Config, comm: Communicator) -> dict[int, ExpertGroup]:
    """Make the groups of a model's layers of experts, and declare each rank's (all ranks call).

    Args:
        model: its layers of experts are bound to the groups.
        config: validated.
        comm: all ranks.

    Returns:
        The groups, by the number of their ranks.
    """
    return bind_experts(model, comm, data_first=config.use_data_before_expert_parallelism)
