"""Making sure that all ranks were given the same before they begin to exchange anything.

Ranks that build different models or read different configurations would exchange messages of different sizes, or wait
for each other for ever, or, worst, each train a part of the model by rules of its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from shardwise.comm.communicator import Communicator
from shardwise.errors import DesyncError

_SHOWN = 5
"""Differences that the error lists."""


def check_agreement(comm: Communicator, facts: Mapping[str, str]) -> None:
    """Compare what ranks were given; one small all-reduce, and more only if they differ (all ranks call).

    Args:
        comm: the ranks that have to agree.
        facts: what this rank was given: name of a fact to what it is, in the same order on all ranks.

    Raises:
        DesyncError: on every rank, if any rank's facts differ from rank 0's; the first differences are listed.
    """
    if comm.world == 1:
        return
    given = comm.fingerprints(json.dumps(list(facts.items())), "agreement")
    others = [rank for rank, found in enumerate(given) if found != given[0]]
    if not others:
        return
    first = dict(comm.share_object(list(facts.items()), "agreement.first"))  # type: ignore[call-overload]
    other = dict(comm.share_object(list(facts.items()), "agreement.other", src=others[0]))  # type: ignore[call-overload]
    lines = [
        f"  {name}: {first.get(name, 'nothing')} on rank 0, {other.get(name, 'nothing')} on rank {others[0]}"
        for name in dict.fromkeys([*first, *other])
        if first.get(name) != other.get(name)
    ]
    more = f"\n  and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    which = f"rank {others[0]} was" if len(others) == 1 else f"ranks {', '.join(map(str, others))} were"
    raise DesyncError(
        f"initialize(): {which} not given the same as rank 0:\n"
        + "\n".join(lines[:_SHOWN] or ["  the same in another order"])
        + more
        + "\nEvery rank has to build the same model and read the same configuration; only data may differ."
    )
