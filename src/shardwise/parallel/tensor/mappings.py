"""Where activations go from whole to divided and back: each function with the one that is its gradient.

    forward            backward
    enter              same values              sum over ranks      before a layer that has some of the columns
    leave              sum over ranks           same values         after a layer that has some of the rows
    gather             put together             own part
    split              own part                 put together
    gather_summed      put together             sum, own part       between tokens that ranks share and layers
    sum_split          sum, own part            put together

The first two are f and g of Shoeybi et al., "Megatron-LM" (1909.08053), the last two those of Korthikanti et al.,
"Reducing Activation Recomputation in Large Transformer Models" (2205.05198).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.compat import has_values
from shardwise.parallel.tensor.group import TensorGroup


def enter(x: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    """Return x; its gradient is the sum of what all ranks make of it.

    Layers that get the same tensor one after the other (queries, keys and values) share one sum.
    """
    if group.size == 1 or not (torch.is_grad_enabled() and x.requires_grad):
        return x
    made = group.entered(x)
    if made is None:
        made = _Enter.apply(x, group)
        group.note_entered(x, made)
    return made


def leave(x: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    """Return the sum of x over the ranks, the same bits on each."""
    return x if group.size == 1 else _Leave.apply(x, group)


def gather(x: torch.Tensor, group: TensorGroup, sizes: Sequence[int], dim: int = -1) -> torch.Tensor:
    """Return the parts of all ranks, put together in one dimension.

    Args:
        x: this rank's part.
        group: of the ranks.
        sizes: of the parts in that dimension, by place.
        dim: see above.
    """
    return x if group.size == 1 else _Gather.apply(x, group, tuple(sizes), dim, False)


def split(x: torch.Tensor, group: TensorGroup, sizes: Sequence[int], dim: int = -1) -> torch.Tensor:
    """Return this rank's part of x, which all ranks have; arguments as of `gather`."""
    return x if group.size == 1 else _Split.apply(x, group, tuple(sizes), dim, False)


def gather_summed(x: torch.Tensor, group: TensorGroup, sizes: Sequence[int], dim: int) -> torch.Tensor:
    """Return the parts of all ranks, put together; each rank makes something else of them: gradients are summed."""
    return x if group.size == 1 else _Gather.apply(x, group, tuple(sizes), dim, True)


def sum_split(x: torch.Tensor, group: TensorGroup, sizes: Sequence[int], dim: int) -> torch.Tensor:
    """Return this rank's part of the sum of x over the ranks."""
    return x if group.size == 1 else _Split.apply(x, group, tuple(sizes), dim, True)


def total(x: torch.Tensor, group: TensorGroup, label: str) -> torch.Tensor:
    """Return the sum over ranks in new memory; half precision is added up in fp32 and rounded once."""
    length = x.numel()
    flat = x.new_empty(length + -length % group.size)
    flat[:length].copy_(x.reshape(-1))
    flat[length:].zero_()
    if has_values(flat):
        group.comm.sum_large(flat, label)
    return flat[:length].view(x.shape)


def together(x: torch.Tensor, group: TensorGroup, sizes: Sequence[int], dim: int, label: str) -> torch.Tensor:
    """Return the parts of all ranks, put together in new memory."""
    outer = x.movedim(dim, 0).contiguous()
    rest = outer.shape[1:]
    each = rest.numel()
    received = x.new_empty(sum(sizes) * each)
    if has_values(x):
        if len(set(sizes)) == 1:
            group.comm.all_gather([(received, outer.view(-1))], label, kind="explicit").wait()
        else:
            given = outer.view(-1).repeat(group.size)
            counts = [size * each for size in sizes]
            group.comm.all_to_all(received, given, counts, [outer.numel()] * group.size, label).wait()
    return received.view(sum(sizes), *rest).movedim(0, dim)


def part(x: torch.Tensor, group: TensorGroup, sizes: Sequence[int], dim: int) -> torch.Tensor:
    """Return the view of this rank's part."""
    return x.narrow(dim, sum(sizes[: group.place]), sizes[group.place])


def summed_part(x: torch.Tensor, group: TensorGroup, sizes: Sequence[int], dim: int, label: str) -> torch.Tensor:
    """Return this rank's part of the sum over ranks."""
    if len(set(sizes)) > 1:
        return part(total(x, group, label), group, sizes, dim).contiguous()
    outer = x.movedim(dim, 0).contiguous()
    wide = torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype
    own = torch.empty(outer.numel() // group.size, dtype=wide, device=x.device)
    if has_values(x):
        group.comm.reduce_scatter([(own, outer.view(-1))], label, kind="explicit").wait()
    return own.to(x.dtype).view(sizes[group.place], *outer.shape[1:]).movedim(0, dim)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: TensorGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return total(gradient, ctx.group, "tensor_enter.backward"), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: TensorGroup) -> torch.Tensor:
        return total(x, group, "tensor_leave")

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: TensorGroup, sizes: tuple[int, ...], dim: int, summed: bool
    ) -> torch.Tensor:
        ctx.how = group, sizes, dim, summed
        return together(x, group, sizes, dim, "tensor_gather")

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        group, sizes, dim, summed = ctx.how
        if summed:
            own = summed_part(gradient, group, sizes, dim, "tensor_gather.backward")
        else:
            own = part(gradient, group, sizes, dim)
        return own, None, None, None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: TensorGroup, sizes: tuple[int, ...], dim: int, summed: bool
    ) -> torch.Tensor:
        ctx.how = group, sizes, dim
        if summed:
            return summed_part(x, group, sizes, dim, "tensor_split")
        return part(x, group, sizes, dim).clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        group, sizes, dim = ctx.how
        return together(gradient, group, sizes, dim, "tensor_split.backward"), None, None, None, None
