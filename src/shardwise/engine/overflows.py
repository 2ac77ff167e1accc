"""Where an overflow comes from: found out once it is known, from what is still there and what ranks tell each other."""

from __future__ import annotations

from dataclasses import astuple
from typing import TYPE_CHECKING

import torch

from shardwise.checkpoint.agree import exchange
from shardwise.precision.overflow import Found, OverflowReport, first_not_finite

if TYPE_CHECKING:
    from shardwise.zero.model import ShardedModel


def explain_overflow(
    sharded: ShardedModel, sums: torch.Tensor, factor: float, loss_scale: float, lost: bool
) -> OverflowReport:
    """Return why the gradients of a window are not finite; all ranks call, and all get the same.

    Args:
        sharded: its accumulators hold the window's sums, as they were reduced.
        sums: sum of squares of each parameter's gradient over all ranks.
        factor: what turns the sums into the gradient.
        loss_scale: what the losses were multiplied by.
        lost: whether a loss of this rank was not finite.
    """
    assert sharded.reducer is not None
    index = first_not_finite(sums)
    found, finite = Found(), True
    if index is not None:
        found = Found.of([values for _, _, values in sharded.gradient_runs(index) or ()])
        finite = sharded.reducer.gradients[sharded.unit_of(index).index].finite
    told = exchange(sharded.comm, sharded.device, (lost, finite, *astuple(found)))
    without_loss = tuple(rank for rank, fact in enumerate(told) if fact[0])
    local = tuple(rank for rank, fact in enumerate(told) if not fact[1])
    if not local and sharded.comm.world == 1:
        local = (0,)  # nothing is sent, and nothing has been watched
    return OverflowReport(
        phase="forward" if without_loss else "backward" if local else "reduce",
        ranks=without_loss or local,
        parameter=None if index is None else sharded.registry[index].name,
        unit=None if index is None else sharded.unit_of(index).name,
        numel=0 if index is None else sharded.registry[index].numel,
        infinite=sum(fact[2] for fact in told),
        nan=sum(fact[3] for fact in told),
        largest=max(fact[4] for fact in told) * factor,
        loss_scale=loss_scale,
    )
