"""What an optimizer has to be given, in the words of the part that gives it."""

from __future__ import annotations

import torch

from shardwise.optim import Sharding, group_shardings
from shardwise.optim.sharding import COST_METHOD
from shardwise.zero.updates.update import Stepping


def stepping_of(optimizer: torch.optim.Optimizer | None) -> Stepping:
    """Return which groups are stepped whole, and what else the optimizer needs.

    Raises:
        ConfigError: the optimizer cannot be sharded; the message says why.
    """
    if optimizer is None:
        return Stepping()
    kinds = group_shardings(optimizer)
    return Stepping(
        whole=frozenset(number for number, kind in enumerate(kinds) if kind is Sharding.WHOLE),
        norms=Sharding.NORMS in kinds,
        cost=getattr(optimizer, COST_METHOD, None),
        communicates=Sharding.COMMUNICATES in kinds,
    )
