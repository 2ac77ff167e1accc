"""Collectives between unsharded and tensor-parallel activations, with their gradients.

    forward            backward
    enter              identity                 all-reduce          before a column-parallel layer
    leave              all-reduce               identity            after a row-parallel layer
    gather             all-gather               own part
    split              own part                 all-gather
    gather_tokens      all-gather               reduce-scatter      from sharded tokens to tensor-parallel layers
    sum_split          reduce-scatter           all-gather

The first two are f and g of Shoeybi et al., "Megatron-LM" (1909.08053), the last two are from Korthikanti et al.,
"Reducing Activation Recomputation in Large Transformer Models" (2205.05198).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.parallel.tensor.group import TensorGroup


def enter(x: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    """Identity in forward, all-reduce in backward, which consecutive layers with the same input share."""
    if group.size == 1 or not (torch.is_grad_enabled() and x.requires_grad):
        return x
    made = group.entered(x)
    if made is None:
        made = _Enter.apply(x, group)
        group.note_entered(x, made)
    return made


def keeps_features(node: Any) -> bool:
    """Return True if a node of autograd's graph exchanges no features: `enter`, or an exchange of tokens."""
    kind = type(node).__name__
    if kind == f"{_Split.__name__}Backward":
        return not node.summed
    return kind in (f"{_Enter.__name__}Backward", f"{_GatherTokens.__name__}Backward")


def leave(x: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    """All-reduce in forward, bit-identical on all ranks; identity in backward."""
    return x if group.size == 1 else _Leave.apply(x, group)


def gather(x: torch.Tensor, group: TensorGroup, sizes: Sequence[int], dim: int = -1) -> torch.Tensor:
    """All-gather the parts of all ranks (`sizes` by rank) along a dimension; own part in backward."""
    return x if group.size == 1 else _Gather.apply(x, group, tuple(sizes), dim)


def split(x: torch.Tensor, group: TensorGroup, sizes: Sequence[int], dim: int = -1) -> torch.Tensor:
    """Return this rank's part of an unsharded x; all-gather in backward. Arguments as of `gather`."""
    return x if group.size == 1 else _Split.apply(x, group, tuple(sizes), dim, False)


def gather_tokens(x: torch.Tensor, group: TensorGroup, sizes: Sequence[int], dim: int) -> torch.Tensor:
    """All-gather sharded tokens for tensor-parallel and other layers.

    In backward, gradients from tensor-parallel layers (`enter`) differ between ranks and are reduce-scattered.
    Gradients from other layers are equal, and each rank takes its part.
    """
    if group.size == 1:
        return x
    whole, summed = _GatherTokens.apply(x, group, tuple(sizes), dim)
    if whole.requires_grad:
        group.note_entered(whole, summed)
    return whole


def sum_split(x: torch.Tensor, group: TensorGroup, sizes: Sequence[int], dim: int) -> torch.Tensor:
    """Reduce-scatter x over the ranks; all-gather in backward."""
    return x if group.size == 1 else _Split.apply(x, group, tuple(sizes), dim, True)


def total(x: torch.Tensor, group: TensorGroup, label: str) -> torch.Tensor:
    """Return the all-reduced tensor in new memory (`Communicator.sum_large`)."""
    flat, length = x.contiguous().view(-1), x.numel()
    # Not a view, because layer outputs are often modified in place.
    found = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not group.carries(x):
        return found
    if length % group.size == 0:
        group.comm.sum_large(flat, label, found.view(-1))
        return found
    flat = torch.cat([flat, flat.new_zeros(-length % group.size)])
    group.comm.sum_large(flat, label)
    return found.copy_(flat[:length].view(x.shape))


def together(x: torch.Tensor, group: TensorGroup, sizes: Sequence[int], dim: int, label: str) -> torch.Tensor:
    """Return the all-gathered parts in new memory; all parts are padded to the largest."""
    most, place = max(sizes), dim % x.dim()
    own = _filled_up(x, most, place).contiguous()
    in_place = len(set(sizes)) == 1 and own[(slice(0, 1),) * place].numel() == own.numel()
    shape = [*own.shape[:place], sum(sizes), *own.shape[place + 1 :]] if in_place else [group.size, *own.shape]
    received = torch.empty(shape, dtype=x.dtype, device=x.device)
    if group.carries(x):
        group.comm.all_gather([(received.view(-1), own.view(-1))], label, kind="explicit").wait()
    if in_place:
        return received
    return torch.cat([rows.narrow(place, 0, size) for rows, size in zip(received, sizes, strict=True)], place)


def part(x: torch.Tensor, group: TensorGroup, sizes: Sequence[int], dim: int) -> torch.Tensor:
    """Return a view of this rank's part."""
    return x.narrow(dim, sum(sizes[: group.place]), sizes[group.place])


def summed_part(x: torch.Tensor, group: TensorGroup, sizes: Sequence[int], dim: int, label: str) -> torch.Tensor:
    """Return this rank's part of the sum over ranks; half precision is accumulated in fp32 and rounded once."""
    most, place, here = max(sizes), dim % x.dim(), sizes[group.place]
    if min(sizes) == most:  # one copy, and none if parts lie one behind the other
        given = x.unflatten(place, (len(sizes), most)).movedim(place, 0).reshape(-1)
    else:
        given = torch.cat([_filled_up(some, most, place).flatten() for some in x.split(list(sizes), place)])
    wide = torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype
    own = torch.empty([*x.shape[:place], most, *x.shape[place + 1 :]], dtype=wide, device=x.device)
    if group.carries(x):
        group.comm.reduce_scatter([(own.view(-1), given)], label, kind="explicit").wait()
    return own.to(x.dtype) if here == most else own.narrow(place, 0, here).to(x.dtype, copy=True)


def _filled_up(x: torch.Tensor, size: int, dim: int) -> torch.Tensor:
    missing = size - x.shape[dim]
    if not missing:
        return x
    return torch.cat([x, x.new_zeros([*x.shape[:dim], missing, *x.shape[dim + 1 :]])], dim)


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
    def forward(ctx: Any, x: torch.Tensor, group: TensorGroup, sizes: tuple[int, ...], dim: int) -> torch.Tensor:
        ctx.how = group, sizes, dim
        return together(x, group, sizes, dim, "tensor_gather")

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return part(gradient, *ctx.how), None, None, None


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: TensorGroup, sizes: tuple[int, ...], dim: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.how = group, sizes, dim
        ctx.set_materialize_grads(False)
        whole = together(x, group, sizes, dim, "tensor_gather")
        return whole, whole.view_as(whole)

    @staticmethod
    def backward(
        ctx: Any, same: torch.Tensor | None, summand: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, None, None, None]:
        group, sizes, dim = ctx.how
        own = None if summand is None else summed_part(summand, group, sizes, dim, "tensor_gather.backward")
        if same is not None:
            alike = part(same, group, sizes, dim)
            own = alike if own is None else own + alike
        return own, None, None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: TensorGroup, sizes: tuple[int, ...], dim: int, summed: bool
    ) -> torch.Tensor:
        ctx.how, ctx.summed = (group, sizes, dim), summed
        if summed:
            return summed_part(x, group, sizes, dim, "tensor_split")
        return part(x, group, sizes, dim).clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        group, sizes, dim = ctx.how
        return together(gradient, group, sizes, dim, "tensor_split.backward"), None, None, None, None
