"""Making sure that all ranks were given the same before they begin to exchange anything.

Ranks that build different models or read different configurations would exchange messages of different sizes, or wait
for each other for ever, or, worst, each train a part of the model by rules of its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from shardwise.comm.communicator import Communicator, named_ranks
from shardwise.errors import DesyncError

_VERSIONS = 4
"""Of what differs, so many are compared."""
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
    if len(set(given)) > 1:
        raise difference(comm, facts, given)


def difference(comm: Communicator, facts: Mapping[str, str], given: Sequence[str]) -> DesyncError:
    """Return an error that names what differs (all ranks call); one rank sends each of the first few versions.

    Args:
        comm: the ranks that have to agree.
        facts: see `check_agreement`.
        given: of each rank, what is equal where facts are.
    """
    senders: dict[str, int] = {}
    for rank, version in enumerate(given):
        senders.setdefault(version, rank)
    told: dict[int, dict[str, str]] = {}
    for rank in list(senders.values())[:_VERSIONS]:
        told[rank] = dict(comm.share_object(list(facts.items()), "agreement.facts", src=rank))  # type: ignore[call-overload]
    lines = [
        f"  {name}: " + ", ".join(f"{version.get(name, 'nothing')} on rank {rank}" for rank, version in told.items())
        for name in dict.fromkeys(name for version in told.values() for name in version)
        if len({version.get(name) for version in told.values()}) > 1
    ]
    more = f"\n  and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    others = [rank for rank, version in enumerate(given) if version != given[0]]
    return DesyncError(
        f"initialize(): {named_ranks(others)} {'was' if len(others) == 1 else 'were'} not given the same as rank 0:\n"
        + "\n".join(lines[:_SHOWN] or ["  the same in another order"])
        + more
        + "\nEvery rank has to build the same model and read the same configuration; only data may differ."
    )
