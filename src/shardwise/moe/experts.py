"""Experts of a rank, as modules or as stacked weights, and their computation from dispatched rows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from shardwise.compat import grouped_product, has_values, writes_empty_groups
from shardwise.device.streams import numbers_on
from shardwise.errors import UsageError
from shardwise.moe.dispatch import by_expert, permuted
from shardwise.moe.exchange import ExpertGroup, RowCounts


class Experts(nn.Module):
    """Experts as separate modules: copies of one module, which start equal, or a ModuleList of `num_local_experts`."""

    def __init__(self, expert: nn.Module, num_local_experts: int = 1) -> None:
        super().__init__()
        given = list(expert) if isinstance(expert, nn.ModuleList) else []
        if given and len(given) != num_local_experts:
            raise UsageError(f"Experts: {len(given)} experts are given, {num_local_experts} expected")
        copies = (copy.deepcopy(expert) for _ in range(0 if given else num_local_experts))
        self.deepspeed_experts = nn.ModuleList(given or copies)
        self.num_local_experts = num_local_experts

    def forward(self, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return each expert's output for its rows; experts without rows are also called."""
        found = []
        for expert, own in zip(self.deepspeed_experts, rows, strict=True):
            made = expert(own)
            found.append(made[0] if isinstance(made, tuple) else made)  # some return a bias as well
        return found


def through_slots(
    group: ExpertGroup,
    rows: torch.Tensor,
    experts: int,
    compute: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
    label: str,
) -> torch.Tensor:
    """Compute rows, sorted by expert, by all experts of a group, with a fixed capacity; the host does not wait."""
    capacity, width = len(rows) // experts, rows.shape[-1]
    # The label makes different capacities an error instead of an exchange of wrong rows.
    label = f"{label}, {capacity} places"
    each = [len(rows) // group.size] * group.size
    arrived = group.exchange(rows, each, each, f"{label}: to experts")
    here = experts // group.size
    by_rank = arrived.view(group.size, here, capacity, width).transpose(0, 1).reshape(here, -1, width)
    made = torch.stack(list(compute(by_rank.unbind(0))))
    back = made.view(here, group.size, capacity, -1).transpose(0, 1).reshape(len(rows), -1)
    return group.exchange(back, each, each, f"{label}: from experts")


def in_turn_of(
    group: ExpertGroup,
    rows: torch.Tensor,
    counts: RowCounts,
    compute: Callable[[torch.Tensor, GroupSizes], torch.Tensor],
    label: str,
) -> torch.Tensor:
    """Compute rows, sorted by expert, by all experts of a group, without capacity limit (dropless)."""
    if group.size == 1:
        return compute(rows, GroupSizes(counts=counts))
    sent, received = counts.read()
    away, arriving = [sum(own) for own in sent], [sum(own) for own in received]
    arrived = group.exchange(rows, away, arriving, f"{label}: to experts")
    order, inverse = by_expert(counts.arriving, len(arrived))
    made = permuted(compute(permuted(arrived, order, inverse), GroupSizes(counts=counts)), inverse, order)
    return group.exchange(made, arriving, away, f"{label}: from experts")


class GroupSizes:
    """Number of rows of each expert of this rank; `counts` may be only on the device."""

    def __init__(self, sizes: Sequence[int] = (), counts: RowCounts | None = None) -> None:
        self._sizes = list(sizes)
        self._counts = counts

    def on_host(self) -> list[int]:
        """Return the numbers, waiting for the device if they are only there."""
        if self._counts is not None:
            self._sizes, self._counts = [sum(own) for own in zip(*self._counts.read()[1], strict=True)], None
        return self._sizes

    def on(self, device: torch.device) -> torch.Tensor:
        """Return the numbers as a tensor on a device, without blocking the host."""
        if self._counts is not None and has_values(self._counts.on_device):
            return self._counts.on_device
        return numbers_on(device, self.on_host(), torch.int64)


def grouped_linear(rows: torch.Tensor, weight: torch.Tensor, sizes: GroupSizes, *, grouped: bool) -> torch.Tensor:
    """Multiply the rows of each expert, [rows, in], by its own matrix of [experts, out, in].

    Uses one grouped matrix product if `grouped`, and torch supports it for this device, dtype and size.
    """
    if torch.is_autocast_enabled(rows.device.type):
        dtype = torch.get_autocast_dtype(rows.device.type)
        rows, weight = rows.to(dtype), weight.to(dtype)
    product = grouped_product(weight) if grouped and len(rows) else None
    if product is not None:
        counts = sizes.on(rows.device)
        if not writes_empty_groups(weight.device):
            weight = _ZeroUnused.apply(weight, counts)
        return product(rows, weight.transpose(-2, -1), counts.cumsum(0, dtype=torch.int32))
    # unbind has one backward node for all weights; each slice would create a gradient of the whole tensor.
    pairs = zip(rows.split(sizes.on_host()), weight.unbind(0), strict=True)
    return torch.cat([F.linear(own, matrix) for own, matrix in pairs])


class _ZeroUnused(torch.autograd.Function):
    """Identity in forward; in backward, zero gradient for matrices without rows, for any incoming values."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(counts)
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (counts,) = ctx.saved_tensors
        return gradient.masked_fill_((counts == 0)[:, None, None], 0.0), None
