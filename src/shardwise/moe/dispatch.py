"""Dispatch of tokens to experts by sorting, without matrices of tokens x experts x capacity.

The choice of token t at place c has the number c * tokens + t. Because of this numbering, a stable sort puts all first
choices before the second ones. Choices and rows without counterpart (an empty place, a dropped choice) have the number
one past the last, which stands for a row of zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class DispatchPlan:
    """Mapping between expert rows and the choices of tokens."""

    source: torch.Tensor  # the choice of each row
    place: torch.Tensor  # the row of each choice; [k, tokens]
    whole: bool  # every row has a choice and every choice a row

    def spread(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the expert rows: a copy of each row's token."""
        count = len(tokens)
        index = self.source % max(count, 1)
        if not self.whole:
            index = torch.where(self.source < self.place.numel(), index, count)
        moved: torch.Tensor = _Take.apply(tokens, index, self.place, self.whole)
        return moved

    def joined(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of each token's rows; weights are [k, tokens]."""
        picked: torch.Tensor = _Take.apply(rows, self.place.reshape(-1), self.source[None], self.whole)
        return (picked.view(*self.place.shape, rows.shape[-1]) * weights[..., None].to(rows.dtype)).sum(0)


def ranked(experts: torch.Tensor, count: int, first: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the number of each choice, [k, tokens], within its expert, and the sizes of all, [count + 1].

    The expert `count` stands for none. `first` orders the choices (None: by their numbers).

    >>> number, sizes = ranked(torch.tensor([[1, 0, 1]]), 2)
    >>> number.tolist(), sizes.tolist()
    ([[0, 0, 1]], [1, 2, 0])
    """
    flat = experts.reshape(-1)
    order = torch.argsort(flat, stable=True) if first is None else first[torch.argsort(flat[first], stable=True)]
    sizes = counted(flat, count + 1)
    begins = sizes.cumsum(0) - sizes
    number = torch.empty_like(flat)
    number[order] = torch.arange(len(flat), device=flat.device) - begins[flat[order]]
    return number.view_as(experts), sizes


def counted(experts: torch.Tensor, count: int) -> torch.Tensor:
    """Return the frequency of each number below `count`, without waiting for the device."""
    flat = experts.reshape(-1)
    return torch.zeros(count, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))


def in_slots(experts: torch.Tensor, number: torch.Tensor, count: int, capacity: int) -> DispatchPlan:
    """Return the dispatch plan with `capacity` places for each of `count` experts, which drops excess choices.

    `experts` are [k, tokens], `count` for none; `number` is that of each choice within its expert.
    """
    total = count * capacity
    fits = (number < capacity) & (experts < count)
    place = torch.where(fits, experts * capacity + number, total)
    source = torch.full((total + 1,), experts.numel(), dtype=torch.int64, device=experts.device)
    source[place.reshape(-1)] = torch.arange(experts.numel(), device=experts.device)
    return DispatchPlan(source[:total], place, whole=False)


def in_turn(experts: torch.Tensor, rows: int | None = None) -> DispatchPlan:
    """Return the dropless dispatch plan, sorted by expert; `rows` excludes choices without expert, which come last."""
    flat = experts.reshape(-1)
    source = torch.argsort(flat, stable=True)
    place = torch.empty_like(source)
    place[source] = torch.arange(len(flat), device=flat.device)
    if rows is None:
        return DispatchPlan(source, place.view_as(experts), whole=True)
    return DispatchPlan(source[:rows], place.view_as(experts).clamp(max=rows), whole=False)


def by_expert(sizes: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the permutation from rows sorted by rank, then expert, to rows sorted by expert; and its inverse.

    `sizes` are the numbers of rows, [ranks, experts], with the sum `rows`, on the device, for which the host need not
    wait.

    >>> [order.tolist() for order in by_expert(torch.tensor([[1, 2], [1, 0]]), 4)]
    [[0, 3, 1, 2], [0, 2, 3, 1]]
    """
    turned = sizes.T.contiguous()
    begins, turned_begins = (one.view(-1).cumsum(0).view_as(one) - one for one in (sizes, turned))
    number = torch.arange(rows, device=sizes.device)

    def moved(by: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        return number + by.reshape(-1).repeat_interleave(counts.view(-1), output_size=rows)

    return moved(begins.T - turned_begins, turned), moved(turned_begins.T - begins, sizes)


def permuted(rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """Return permuted rows; the backward pass permutes gradients by the inverse."""
    moved: torch.Tensor = _Take.apply(rows, order, inverse[None], True)
    return moved


class _Take(torch.autograd.Function):
    """Gather of rows by index; the backward pass gathers and sums the gradients of a row's copies."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, index: torch.Tensor, copies: torch.Tensor, whole: bool) -> torch.Tensor:
        ctx.save_for_backward(copies)
        ctx.whole = whole
        return _with_zeros(rows, whole)[index]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # Because this does not scatter, the sum has one order on every device and needs no atomic additions.
        (copies,) = ctx.saved_tensors
        found = _with_zeros(gradient, ctx.whole)[copies]
        return found[0] if len(copies) == 1 else found.sum(0), None, None, None


def _with_zeros(rows: torch.Tensor, whole: bool) -> torch.Tensor:
    return rows if whole else torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])
