"""Tensors of which ranks have parts: assembled from the parts, and cut again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from shardwise.boxes import sizes
from shardwise.comm.communicator import Communicator
from shardwise.compat import never_compiled, without_overrides
from shardwise.errors import UsageError
from shardwise.memory import Accountant, Category
from shardwise.registry import HeldPart, LogicalTensor, Registry, paste
from shardwise.zero.units.global_ids import GlobalTensorIds

Shown = tuple[LogicalTensor, nn.Parameter, torch.Tensor]
"""Tensor, parameter that shows the whole tensor for a while, and its values meanwhile."""


class Wholes:
    """Assembles the tensors of one engine.

    All ranks call the methods, each with its parameter at one place of the units. These may belong to different
    tensors: experts that are divided over ranks have names of their own.
    """

    def __init__(
        self, registry: Registry, numbering: GlobalTensorIds, comm: Communicator, accountant: Accountant
    ) -> None:
        self._registry = registry
        self._numbering = numbering
        self._comm = comm
        self._accountant = accountant

    def parts_of(self, index: int) -> Sequence[HeldPart]:
        """Return the parts that ranks have at the place of a parameter (`GlobalTensorIds.parts_of`)."""
        return self._numbering.parts_of(index)

    def divided(self, index: int) -> bool:
        """Return True if ranks have parts of tensors at the place of a parameter; the same on all ranks."""
        return any(not part.whole for part in self.parts_of(index))

    def assemble(self, index: int, own: torch.Tensor) -> torch.Tensor:
        """Return the whole tensor of this rank's part `own`, of one dtype on all ranks (all ranks call, if `divided`).

        Raises UsageError, on all ranks alike, if some elements are parts at other places, or on no rank.
        """
        if not self.divided(index):
            return own
        tensor, parts = self._registry[index], self.parts_of(index)
        for name in dict.fromkeys(part.name for part in parts):
            some = [part for part in parts if part.name == name]
            held, numel = sum(part.numel for part in some), torch.Size(some[0].shape).numel()
            if held != numel:
                raise UsageError(
                    f"parameter {name!r}: what ranks have declared of it at this place has {held} of {numel} elements, "
                    "so there is no whole tensor. Have it from engine.module_state_dict(), which knows all parts, or "
                    "take the functions of one rank's part (safe_get_local_..., at stage 3)"
                )
        whole = torch.empty(tensor.global_shape, dtype=own.dtype, device=own.device)
        self._accountant.hold(Category.BUFFERS, whole)
        for part in parts:
            values = own.contiguous()
            if self._comm.rank != part.ranks[0]:
                values = torch.empty(sizes(part.box), dtype=own.dtype, device=own.device)
                self._accountant.hold(Category.BUFFERS, values)
            self._comm.broadcast(values, part.ranks[0], part.name).wait()
            if part.name == tensor.name:
                paste(values, part.box, whole)
        return whole

    @never_compiled
    def show(self, parameters: Iterable[nn.Parameter]) -> list[Shown]:
        """Make unsharded parameters show the tensors that they are parts of; return the changed parameters."""
        shown: list[Shown] = []
        for parameter in parameters:
            tensor = self._registry.find(parameter)
            if tensor is not None and self.divided(tensor.index):
                shown.append((tensor, parameter, self.assemble(tensor.index, parameter.detach())))
        with without_overrides():
            for _, parameter, whole in shown:
                parameter.data = whole
        return shown

    def agree(self, shown: Iterable[Shown], src: int) -> None:
        """Broadcast the values of rank number `src`, or of the first rank with a part if `src` has none (experts)."""
        for tensor, _, whole in shown:
            parts = self.parts_of(tensor.index)
            for name in dict.fromkeys(part.name for part in parts):
                holders = sorted(rank for part in parts if part.name == name for rank in part.ranks)
                shape = next(part.shape for part in parts if part.name == name)
                values = whole if name == tensor.name else torch.empty(shape, dtype=whole.dtype, device=whole.device)
                self._comm.broadcast(values, src if src in holders else holders[0], f"{name}.modified").wait()
