"""Tensor parallelism of a model for inference: the group of ranks, and layers divided in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.comm.communicator import Communicator, members_of
from shardwise.comm.ledger import Ledger
from shardwise.config.schema.parallel import TensorParallel
from shardwise.errors import ConflictError
from shardwise.parallel.sequence import across
from shardwise.parallel.tensor.entry import divide_model, divided_over
from shardwise.parallel.tensor.group import NAME, TensorGroup
from shardwise.parallel.tensor.layers import Parallel


class InferenceRanks:
    """Ranks that share a copy of a model, connected until `close()`. All ranks of `group` create it together.

    Args:
        size: adjacent ranks that share a copy.
        device: of the ranks.
        group: process group of the ranks, in groups of `size`; None: all.

    Attributes:
        tensor: the tensor-parallel group; None: one rank has a whole copy.

    Raises:
        ConflictError: the ranks are not whole groups of `size`.
    """

    def __init__(self, size: int, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        members = members_of(group)
        if len(members) % size:
            raise ConflictError(
                f"tensor_parallel.tp_size is {size}, but the number of ranks is {len(members)}, not a multiple of "
                f"{size}; choose a divisor of {len(members)}, or start a multiple of {size} ranks"
            )
        self.everybody = Communicator(group, Ledger(), device, name="inference", call="init_inference()")
        self.tensor: TensorGroup | None = None
        if size > 1:
            lines = [list(range(first, first + size)) for first in range(0, len(members), size)]
            comm = self.everybody.part(lines, NAME, near=True)
            self.tensor = TensorGroup(comm, across(lines), comm.rank)

    def close(self) -> None:
        """Disconnect the ranks (all call)."""
        if self.tensor is not None:
            self.tensor.close()
        self.everybody.destroy()


def divide_for_inference(
    model: nn.Module, ranks: InferenceRanks, rows: Sequence[Any] | None, grain: int
) -> list[Parallel]:
    """Divide a model's layers in place, also on the meta device; each kind of block is compared with a whole one.
    Return layers that were divided before.

    `rows` names the layers divided by input features (None: by the model's family or plan), `grain` is as
    `tensor_parallel.tp_grain_size`. A model that `tp_model_init` has divided takes these ranks. Raises a ConfigError if
    nothing can be divided, and a ConflictError for a model divided over another number of ranks.
    """
    known = divided_over(model)
    size = 1 if ranks.tensor is None else ranks.tensor.size
    if known is not None and known.size != size:
        raise ConflictError(
            f"tensor_parallel.tp_size is {size}, and the model's layers are divided over {known.size} ranks already. "
            f"Write {known.size}"
        )
    if ranks.tensor is None:
        return []
    section = TensorParallel.model_validate(
        {"autotp_size": size, "injection_policy_tuple": rows, "tp": {"tp_size": size, "tp_grain_size": grain}}
    )
    return divide_model(model, ranks.tensor, section, ranks.everybody)


def tensor_group_of(model: nn.Module) -> TensorGroup | None:
    """Return the group of a model's divided layers; None without any."""
    return next((module.group for module in model.modules() if isinstance(module, Parallel)), None)
