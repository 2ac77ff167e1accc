"""Collectives of scripts are compared over ranks under `strict_sync`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from shardwise.comm import ReduceOp, all_reduce, all_to_all_single, barrier, broadcast, desync, recv, send
from shardwise.comm.desync import compare_calls
from shardwise.errors import DesyncError
from tests.harness import on_ranks
from tests.harness.training import engine_of

CALLS: dict[str, tuple[Callable[[int], Any], tuple[str, str]]] = {
    "shape": (lambda rank: all_reduce(torch.ones(2 + rank)), ("float32[2], op=SUM", "float32[3], op=SUM")),
    "dtype": (
        lambda rank: broadcast(torch.ones(2, dtype=torch.float64 if rank else torch.float32), 0),
        ("broadcast(float32[2], src=0)", "broadcast(float64[2], src=0)"),
    ),
    "op": (
        lambda rank: all_reduce(torch.ones(2), ReduceOp.MAX if rank else ReduceOp.SUM),
        ("all_reduce(float32[2], op=SUM)", "all_reduce(float32[2], op=MAX)"),
    ),
    "root": (lambda rank: broadcast(torch.ones(2), rank), ("src=0", "src=1")),
    "other": (lambda rank: barrier() if rank else all_reduce(torch.ones(2)), ("all_reduce(", "barrier()")),
}


@pytest.mark.parametrize("kind", CALLS)
@on_ranks(2)
def test_ranks_that_call_something_else_are_named(kind: str) -> None:
    call, said = CALLS[kind]
    with comparing(), pytest.raises(DesyncError, match=r"strict_sync: .* different collectives") as error:
        call(torch.distributed.get_rank())
    for rank, part in enumerate(said):
        (line,) = (line for line in str(error.value).splitlines() if f"rank {rank}: " in line)
        assert part in line and "test_calls.py:" in line


@on_ranks(2)
def test_ranks_that_call_the_same_get_their_results() -> None:
    rank = torch.distributed.get_rank()
    parts = [1, 2] if rank == 0 else [1, 3]
    given, taken, total = torch.ones(sum(parts)) + rank, torch.zeros(2 if rank == 0 else 5), torch.ones(3)
    with comparing():
        all_to_all_single(taken, given, [1, 1] if rank == 0 else [2, 3], parts)
        all_reduce(total)
        if rank:
            send(total, 0)
        else:
            recv(total, 1)
    assert taken.tolist() == ([1.0, 2.0] if rank == 0 else [1.0, 1.0, 2.0, 2.0, 2.0]) and total.tolist() == [2.0] * 3


@on_ranks(2)
def test_an_engine_without_the_key_leaves_that_of_another_engine() -> None:
    first = engine_of(torch.nn.Linear(2, 1), 0, strict_sync=True)
    second = engine_of(torch.nn.Linear(2, 1), 0)
    second.destroy()
    with pytest.raises(DesyncError, match="different collectives"):
        all_reduce(torch.ones(2), ReduceOp.MAX if torch.distributed.get_rank() else ReduceOp.SUM)
    first.destroy()
    first.destroy()
    assert not desync._comparing


@contextlib.contextmanager
def comparing() -> Iterator[None]:
    compare_calls(True)
    try:
        yield
    finally:
        compare_calls(False)
