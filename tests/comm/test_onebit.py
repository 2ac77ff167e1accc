"""One-bit all-reduce: packing, the same bits on all ranks, errors that are made up for, and bytes."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.comm.communicator import Communicator
from shardwise.comm.compression.onebit import OnebitAllReduce, message_bytes, pack_signs, unpack_signs
from shardwise.comm.ledger import Ledger
from tests.harness import run_ranks


@given(st.lists(st.floats(allow_nan=False, width=32), min_size=8, max_size=64))
def test_packing_is_that_of_a_slow_reference(numbers: list[float]) -> None:
    numbers = numbers[: len(numbers) // 8 * 8]
    values = torch.tensor(numbers)
    packed = pack_signs(values)
    expected = [sum(1 << bit for bit in range(8) if numbers[at + bit] >= 0) for at in range(0, len(numbers), 8)]
    # Which bit is whose depends on the order of bytes in a number; here it is the usual one.
    assert packed.tolist() == expected
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        signs = [1.0 if number >= 0 else -1.0 for number in numbers]
        assert unpack_signs(packed, dtype).tolist() == signs
        out = torch.empty(len(numbers), dtype=dtype)
        assert unpack_signs(packed, dtype, out).data_ptr() == out.data_ptr() and out.tolist() == signs


RUNS = [(0, 5), (8, 30), (30, 31), (40, 90)]
"""Of different lengths, with gaps between them, at the end, and at borders of ranges."""


def numel(world: int) -> int:
    return 48 * world


def values_of(rank: int, turn: int, world: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * turn + rank)
    values = torch.zeros(numel(world), dtype=torch.float64)
    for number, (start, stop) in enumerate(RUNS):
        values[start:stop] = torch.randn(stop - start, generator=generator, dtype=torch.float64) * 10.0**-number
    return values


def several_turns(scale: Any, joined: bool, turns: int) -> Any:
    comm = Communicator(None, Ledger(), torch.device("cpu"))
    order = {"norm": 2, "mean": 1}[scale]
    reduction = OnebitAllReduce(comm, numel(comm.world), RUNS, torch.float64, "test", order=order, joined=joined)
    results = []
    for turn in range(turns):
        values = values_of(comm.rank, turn, comm.world)
        assert len(list(reduction.average(values))) == 2  # collectives
        results.append(values)
    sent = {op: totals.sent for op, totals in comm.ledger.totals.items()}
    comm.destroy()
    return results, *reduction.errors.values(), sent, reduction.message_bytes


@pytest.mark.parametrize(("scale", "joined"), [("norm", False), ("mean", False), ("norm", True)])
def test_ranks_have_the_same_bits_and_nothing_is_lost(scale: str, joined: bool) -> None:
    """The values of messages are checked in tests/optim/test_onebit.py."""
    world, turns = 3, 4
    found = run_ranks(several_turns, world, scale, joined, turns)
    padding = [at for at in range(numel(world)) if not any(at in range(*run) for run in RUNS)]
    for own, _, _, sent, size in found:
        for mine, first in zip(own, found[0][0], strict=True):
            assert torch.equal(mine, first) and not mine[padding].any()
        assert sent == {op: turns * (world - 1) * size for op in ("all_to_all", "all_gather")}
        scales = 1 if joined else 4
        assert size == message_bytes(48, scales) == 4 * scales + 8
    meant = sum(values_of(rank, turn, world) for rank in range(world) for turn in range(turns)) / world
    unsaid = sum(worker_error for _, worker_error, _, _, _ in found) / world
    unsaid = unsaid + torch.cat([server_error for _, _, server_error, _, _ in found])
    assert torch.allclose(sum(found[0][0]) + unsaid, meant, atol=1e-6)


def test_bytes_are_a_thirty_second_of_an_exact_reduction() -> None:
    world, size = 8, 100_000_000
    exact = 2 * (world - 1) * 4 * size // world  # reduce-scatter and all-gather
    own = 2 * (world - 1) * message_bytes(size // world, 40)
    assert 32 * own == pytest.approx(exact, rel=1e-3)


class Counting(TorchDispatchMode):
    """Counts operators."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def operators(world: int) -> int:
    """Count the operators of an average on one of many ranks, which receives its own messages from all."""
    comm, values = mock.Mock(world=world, rank=1, device=torch.device("cpu")), torch.randn(48 * world)
    comm.all_to_all.side_effect = lambda received, sent, *_, **__: mock.Mock(wait=lambda: received.copy_(sent))
    mean = OnebitAllReduce(comm, 48 * world, [(at, at + 20) for at in range(0, 48 * world, 24)], torch.float32, "test")
    with Counting() as counting:
        assert len(list(mean.average(values))) == 2
    return counting.count


def test_operators_do_not_grow_with_ranks() -> None:
    assert operators(64) == operators(16)
