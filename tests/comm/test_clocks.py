"""Clocks of ranks: offsets are found within what is said to be unknown."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from shardwise.comm.clocks import Clock, between, measure, measure_by
from shardwise.comm.communicator import Communicator
from shardwise.comm.ledger import Ledger
from tests.harness import on_ranks

AHEAD_S = 1000.0


@pytest.mark.parametrize("transport", ["memory", "messages"])
@pytest.mark.parametrize("world", [2, 3])
@on_ranks("world")
def test_an_offset_is_found_within_the_uncertainty(world: int, transport: str) -> None:
    os.environ["SHARDWISE_TRANSPORT"] = transport  # the harness puts it back
    comm = Communicator(None, Ledger(), torch.device("cpu"))
    assert comm.transport == transport
    found = measure(comm, clock=lambda: time.perf_counter() + AHEAD_S * comm.rank)
    assert [record.label for record in comm.ledger.records()] == ["clocks"] * 33
    assert abs(found.offset + AHEAD_S * comm.rank) <= found.uncertainty
    assert (found.uncertainty == 0) == (comm.rank == 0) and found.uncertainty < 0.1
    comm.destroy()


@pytest.mark.parametrize("slow", ["to others", "from others"])
@on_ranks(2)
def test_where_one_way_takes_longer_the_uncertainty_says_so(slow: str) -> None:
    """Messages to or from rank 1 take longer than the others."""
    rank = dist.get_rank()

    def tell(left: float, had: float) -> tuple[float, float]:
        if (rank == 1) == (slow == "to others"):
            time.sleep(0.005)
        numbers = [torch.zeros(2, dtype=torch.float64) for _ in range(2)]
        dist.all_gather(numbers, torch.tensor([left, had], dtype=torch.float64))
        first, second = numbers[0].tolist()
        return first, second

    found = measure_by(tell, rank, 8, lambda: time.perf_counter() - 50.0 * rank)
    assert abs(found.offset - 50.0 * rank) <= found.uncertainty
    assert found.uncertainty > 0.002 or rank == 0


def test_one_rank_is_rank_0() -> None:
    comm = Communicator(None, Ledger(), torch.device("cpu"))
    assert measure(comm)[:2] == (0.0, 0.0)
    assert not list(comm.ledger.records())


def test_between_two_measurements_a_clock_drifts_evenly() -> None:
    start, end = Clock(1.0, 0.0, at=100.0), Clock(3.0, 0.0, at=200.0)
    assert [between(start, end, at) for at in (50.0, 100.0, 150.0, 250.0)] == [1.0, 1.0, 2.0, 3.0]
    assert between(start, None, 500.0) == 1.0 and between(start, start, 500.0) == 1.0
