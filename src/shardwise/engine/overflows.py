"""Finds the origin of non-finite gradients, from local values and an exchange between ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, replace
from typing import TYPE_CHECKING, Any

import torch

from shardwise.precision.overflow import Extent, Found, OverflowReport, first_not_finite

if TYPE_CHECKING:
    from shardwise.comm.communicator import Communicator
    from shardwise.zero.model import ShardedModel


def explain_overflow(
    sharded: ShardedModel, job: Communicator, sums: torch.Tensor, factor: float, loss_scale: float, lost: bool
) -> OverflowReport:
    """Return the origin of a window's non-finite gradients; all ranks call and get the same. `sums`: squared gradient
    norm of each parameter. `factor`: scale from sums to the gradient. `lost`: a loss was not finite.
    """
    assert sharded.reducer is not None
    place = first_not_finite(sums)
    index = sharded.numbering.index(place)
    found: Found = Found()
    finite: bool | None = True
    if index is not None:
        if sharded.numbering.counts[index]:
            with sharded.state.lent([sharded.unit_of(index)], written=False):
                found = Found.of([values for _, _, values in sharded.state.gradient_runs(index) or ()])
        finite = sharded.reducer.was_finite(sharded.unit_of(index).index)
    told = job.exchange((lost, finite, *_known(sharded, index), *astuple(found)), "overflow")
    return replace(
        _report(sharded, place, sums, told),
        infinite=sum(fact[4] for fact in told),
        nan=sum(fact[5] for fact in told),
        largest=max(fact[6] for fact in told) * factor,
        loss_scale=loss_scale,
    )


def explain_late(sharded: ShardedModel, job: Communicator, sums: torch.Tensor, lost: bool) -> OverflowReport:
    """Return the remaining information, once accumulators hold the next window; all ranks call and get the same."""
    assert sharded.reducer is not None
    place = first_not_finite(sums)
    index = sharded.numbering.index(place)
    finite = index is None or sharded.reducer.was_finite(sharded.unit_of(index).index, formerly=True)
    return _report(sharded, place, sums, job.exchange((lost, finite, *_known(sharded, index)), "overflow"))


def _known(sharded: ShardedModel, index: int | None) -> tuple[str | None, int]:
    if index is None:
        return None, 0
    return sharded.unit_of(index).name, math.prod(sharded.registry[index].global_shape)


def _report(
    sharded: ShardedModel, place: int | None, sums: torch.Tensor, told: Sequence[Sequence[Any]]
) -> OverflowReport:
    """`place`: index of the first tensor with a non-finite gradient; None if only the global norm is non-finite.
    `told`: of each rank: a loss was not finite; gradients of the unit were finite (None: unknown); `_known`; more.
    """
    without_loss = tuple(rank for rank, fact in enumerate(told) if fact[0])
    local = tuple(rank for rank, fact in enumerate(told) if fact[1] is False)
    if not local and len(told) == 1:
        local = (0,)  # a single rank, untraced
    unknown = not local and any(fact[1] is None for fact in told)
    return OverflowReport(
        phase="forward" if without_loss else "backward" if local else "gradients" if unknown else "reduce",
        ranks=without_loss or local,
        parameter=None if place is None else sharded.numbering.names[place],
        unit=next((fact[2] for fact in told if fact[2] is not None), None),
        numel=max(fact[3] for fact in told),
        loss_scale=1.0,
        extent=Extent.of(sums, sharded.numbering.names),
    )
