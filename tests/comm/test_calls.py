"""Collectives of scripts are compared over ranks under `strict_sync`."""

from __future__ import annotations

import pytest
import torch

import shardwise
from shardwise.comm.desync import compare_calls
from shardwise.errors import DesyncError
from tests.harness import run_ranks


def calls(kind: str) -> str:
    rank = torch.distributed.get_rank()
    compare_calls(True)
    try:
        if kind == "shape":
            shardwise.comm.all_reduce(torch.ones(2 + rank))
        elif kind == "dtype":
            shardwise.comm.broadcast(torch.ones(2, dtype=torch.float64 if rank else torch.float32), 0)
        elif kind == "op":
            shardwise.comm.all_reduce(
                torch.ones(2), shardwise.comm.ReduceOp.MAX if rank else shardwise.comm.ReduceOp.SUM
            )
        elif kind == "root":
            shardwise.comm.broadcast(torch.ones(2), rank)
        elif kind == "other":
            if rank:
                shardwise.comm.barrier()
            else:
                shardwise.comm.all_reduce(torch.ones(2))
        else:
            parts = [1, 2] if rank == 0 else [1, 3]
            given, taken = torch.ones(sum(parts)) + rank, torch.zeros(2 if rank == 0 else 5)
            shardwise.comm.all_to_all_single(taken, given, [1, 1] if rank == 0 else [2, 3], parts)
            total = torch.ones(3)
            shardwise.comm.all_reduce(total)
            if rank:
                shardwise.comm.send(total, 0)
            else:
                shardwise.comm.recv(total, 1)
            return f"{taken.tolist()} {total.tolist()}"
    except DesyncError as error:
        return str(error)
    finally:
        compare_calls(False)
    return ""


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("shape", ("rank 0: all_reduce(float32[2], op=SUM) at ", "rank 1: all_reduce(float32[3], op=SUM) at ")),
        ("dtype", ("rank 0: broadcast(float32[2], src=0) at ", "rank 1: broadcast(float64[2], src=0) at ")),
        ("op", ("rank 0: all_reduce(float32[2], op=SUM) at ", "rank 1: all_reduce(float32[2], op=MAX) at ")),
        ("root", ("rank 0: broadcast(float32[2], src=0) at ", "rank 1: broadcast(float32[2], src=1) at ")),
        ("other", ("rank 0: all_reduce(float32[2], op=SUM) at ", "rank 1: barrier() at ")),
    ],
)
def test_ranks_that_call_something_else_are_named(kind: str, said: tuple[str, ...]) -> None:
    for message in run_ranks(calls, 2, kind):
        assert message.startswith("strict_sync: the ranks have called different collectives:")
        assert all(part in message for part in said) and "test_calls.py:" in message


def test_ranks_that_call_the_same_get_their_results() -> None:
    assert run_ranks(calls, 2, "same") == ["[1.0, 2.0] [2.0, 2.0, 2.0]", "[1.0, 1.0, 2.0, 2.0, 2.0] [2.0, 2.0, 2.0]"]
