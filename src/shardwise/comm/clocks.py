"""Clocks of ranks: how far each is from rank 0's, with what is not known of it.

A rank's `time.perf_counter()` counts from any moment, which on other machines is another one. Messages tell the
difference, as in Cristian's method and NTP: what rank 0 has said before a message left was before this rank had it, and
what this rank has said was before rank 0 had it. Each message therefore bounds the difference on one side, however long
it was under way, and the fastest one of each direction decides. All ranks measure side by side: a round is one small
gather, whatever their number.

Clocks drift by some millionths: whoever records for long measures at both ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from shardwise.comm.communicator import Communicator

LABEL = "clocks"
"""Of the collectives that measure, in the ledger."""


def _now() -> float:
    return time.perf_counter()


class Clock(NamedTuple):
    """A rank's clock against rank 0's, at one moment.

    Attributes:
        offset: seconds to be added to this rank's time, for rank 0's.
        uncertainty: seconds; the true offset is nowhere farther away.
        at: this rank's time of the measurement.
    """

    offset: float = 0.0
    uncertainty: float = 0.0
    at: float = 0.0


def measure(comm: Communicator, rounds: int = 32, clock: Callable[[], float] = _now) -> Clock:
    """Compare the clocks of all ranks (all call; a small collective a round, which blocks).

    Args:
        comm: the ranks.
        rounds: more are more exact, the more the busier the ranks are.
        clock: of this rank, in seconds.
    """
    if comm.world == 1 or comm.imagined:
        return Clock(at=clock())
    told = torch.zeros(comm.world, 2, dtype=torch.float64, device=comm.device)
    mine = told[comm.rank]

    def tell(left: float, had: float) -> Sequence[float]:
        mine.copy_(torch.tensor([left, had], dtype=torch.float64, device="cpu"))
        comm.all_gather([(told.view(-1), mine)], LABEL, kind="explicit").wait()
        first: list[float] = told[0].tolist()
        return first

    return measure_by(tell, comm.rank, rounds, clock)


def measure_by(
    tell: Callable[[float, float], Sequence[float]],
    rank: int,
    rounds: int,
    clock: Callable[[], float] = _now,
) -> Clock:
    """Do the same over any gather of two numbers.

    Args:
        tell: takes this rank's numbers, and returns those of rank 0 when it has all ranks'.
        rank: of this process.
        rounds: see `measure`.
        clock: see `measure`.
    """
    low, high = float("-inf"), float("inf")
    left = had = 0.0  # when this rank's last message left, and when it had all others'
    for number in range(rounds + 1):
        before, left = left, clock()
        first_left, first_had = tell(left, had)
        had = clock()
        low = max(low, first_left - had)
        if number:
            high = min(high, first_had - before)
    return Clock((low + high) / 2, abs(high - low) / 2, had) if rank else Clock(at=had)


def between(start: Clock, end: Clock | None, at: float) -> float:
    """Return the offset at a time of this rank: as measured, and between two measurements in proportion.

    >>> between(Clock(1.0, 0.0, at=10.0), Clock(2.0, 0.0, at=20.0), 15.0)
    1.5
    """
    if end is None or end.at <= start.at:
        return start.offset
    share = min(max((at - start.at) / (end.at - start.at), 0.0), 1.0)
    return start.offset + share * (end.offset - start.offset)
