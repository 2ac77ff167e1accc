"""Offsets of the ranks' clocks from rank 0's, with their uncertainty.

`time.perf_counter()` has another origin on each machine. As in Cristian's method and NTP, each message bounds the
offset on one side, however long it travels: a value that rank 0 sent before is older than its receipt here, and the
reverse. The fastest message of each direction decides. All ranks measure at once: a round is one small all-gather.
Clocks drift by some millionths: long recordings measure at both ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from shardwise.comm.communicator import Communicator

LABEL = "clocks"
"""Label of the measuring collectives in the ledger."""


def _now() -> float:
    return time.perf_counter()  # looked up at each call, because tests shift it


class Clock(NamedTuple):
    """Offset from rank 0's clock (to be added), its largest possible error, and this rank's time, in seconds."""

    offset: float = 0.0
    uncertainty: float = 0.0
    at: float = 0.0


def measure(comm: Communicator, rounds: int = 32, clock: Callable[[], float] = _now) -> Clock:
    """Compare the clocks of all ranks (all ranks call); a round, one small blocking collective, adds exactness."""
    if comm.world == 1 or comm.imagined:
        return Clock(at=clock())
    gathered = torch.zeros(comm.world, 2, dtype=torch.float64, device=comm.device)
    mine = gathered[comm.rank]

    def tell(left: float, had: float) -> Sequence[float]:
        mine.copy_(torch.tensor([left, had], dtype=torch.float64, device="cpu"))
        comm.all_gather([(gathered.view(-1), mine)], LABEL, kind="explicit").wait()
        first: list[float] = gathered[0].tolist()
        return first

    return measure_by(tell, comm.rank, rounds, clock)


def measure_by(
    tell: Callable[[float, float], Sequence[float]],
    rank: int,
    rounds: int,
    clock: Callable[[], float] = _now,
) -> Clock:
    """Measure with `tell`, any all-gather of two numbers that returns rank 0's when all have arrived."""
    low, high = float("-inf"), float("inf")
    left = had = 0.0  # times of this rank's last message, and of the arrival of all others'
    for number in range(rounds + 1):
        before, left = left, clock()
        first_left, first_had = tell(left, had)
        had = clock()
        low = max(low, first_left - had)
        if number:
            high = min(high, first_had - before)
    return Clock((low + high) / 2, abs(high - low) / 2, had) if rank else Clock(at=had)


def between(start: Clock, end: Clock | None, at: float) -> float:
    """Return the offset at a time of this rank, interpolated between two measurements.

    >>> between(Clock(1.0, 0.0, at=10.0), Clock(2.0, 0.0, at=20.0), 15.0)
    1.5
    """
    if end is None or end.at <= start.at:
        return start.offset
    share = min(max((at - start.at) / (end.at - start.at), 0.0), 1.0)
    return start.offset + share * (end.offset - start.offset)
