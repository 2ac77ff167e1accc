"""Collectives of the backend itself, here with Gloo's own: values, bits, bytes on the wire, joint launches."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from shardwise import compat
from shardwise.comm import gloo, native
from shardwise.comm.chain import Runner
from shardwise.device.recording import Recorder
from tests.device.recorded import imagined
from tests.harness import run_ranks

Layout = list[tuple[int, torch.dtype, torch.dtype]]
"""(elements of a shard, dtype of the wire, dtype of the sum) of each pair."""

FP32, BF16, FP64 = torch.float32, torch.bfloat16, torch.float64


def pairs_of(layout: Layout) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    world = dist.get_world_size()
    return [
        (torch.full((size,), 0.5, dtype=out), torch.randn(world * size, generator=generator).to(wire))
        for size, wire, out in layout
    ]


def reduced(
    layout: Layout, accumulate: bool, ordered: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[Any]]:
    """The sums, those of `gloo.reduce_scatter`, and the (dtype, elements) of the buffers made."""
    ours, theirs = pairs_of(layout), pairs_of(layout)
    pending = native.reduce_scatter(ours, dist.group.WORLD, accumulate=accumulate, ordered=ordered)
    scratch = [(buffer.dtype, buffer.numel()) for buffer in pending.scratch]
    pending.wait()
    pending.wait()
    assert not pending.scratch
    gloo.reduce_scatter(theirs, dist.group.WORLD, 1, accumulate).wait()
    return [out for out, _ in ours], [out for out, _ in theirs], scratch


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
def test_narrow_wires_are_added_in_rank_order_in_the_dtype_of_the_sum(accumulate: bool, ordered: bool) -> None:
    layout = [(5, BF16, FP32), (0, BF16, FP32), (7, BF16, FP32)]
    for ours, theirs, scratch in run_ranks(reduced, 3, layout, accumulate, ordered):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        # What arrives is as narrow as what was sent; nothing is widened to be sent.
        assert scratch == [(BF16, 15), (BF16, 21)]


@pytest.mark.parametrize("accumulate", [False, True])
def test_ordered_sums_of_the_same_dtype(accumulate: bool) -> None:
    for ours, theirs, scratch in run_ranks(reduced, 3, [(4, FP32, FP32), (3, FP64, FP64)], accumulate, True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        assert scratch == [(FP32, 12), (FP64, 9)]


def test_sums_go_straight_to_their_place() -> None:
    layout = [(4, FP32, FP32), (3, FP64, FP64)]
    for accumulate, expected in ((False, []), (True, [(FP32, 4), (FP64, 3)])):
        for ours, theirs, scratch in run_ranks(reduced, 2, layout, accumulate, False):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))  # two terms: one order
            assert scratch == expected


def widened(accumulate: bool) -> tuple[list[torch.Tensor], list[torch.Tensor], list[Any]]:
    layout = [(5, BF16, FP32), (0, BF16, FP32), (4, FP32, FP32)]
    ours, theirs = pairs_of(layout), pairs_of(layout)
    with mock.patch.object(native, "exchanges", lambda wire, total, world, per_node: (world, per_node) != (2, 1)):
        pending = native.reduce_scatter(ours, dist.group.WORLD, accumulate=accumulate, per_node=1)
    scratch = [(buffer.dtype, buffer.numel()) for buffer in pending.scratch]
    pending.wait()
    gloo.reduce_scatter(theirs, dist.group.WORLD, 1, accumulate).wait()
    return [out for out, _ in ours], [out for out, _ in theirs], scratch


def test_where_nodes_would_send_more_the_backend_adds_up_what_has_been_widened() -> None:
    for accumulate, more in ((False, []), (True, [(FP32, 5)])):
        for ours, theirs, scratch in run_ranks(widened, 2, accumulate):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))  # two terms: one order
            assert scratch == [(FP32, 10), *more, *([(FP32, 4)] if accumulate else [])]


@pytest.mark.parametrize(
    ("world", "per_node", "exchanged"),
    [
        (8, 8, True),  # one node
        (2, 1, True),
        (512, 1, True),  # the outer dimension of HSDP
        (16, 2, True),
        (8, 4, True),  # as many
        (12, 4, False),
        (16, 8, False),
        (512, 8, False),
    ],
)
def test_what_is_sent_between_nodes_decides(world: int, per_node: int, exchanged: bool) -> None:
    for wire in (BF16, torch.float16):
        assert native.exchanges(wire, FP32, world, per_node) is exchanged
        sent = per_node * (world - per_node) / world * wire.itemsize
        assert exchanged is (sent <= FP32.itemsize)
    assert not native.exchanges(FP32, FP32, world, per_node)
    assert native.exchanges(FP32, BF16, world, per_node)  # widening is for narrow wires only


def launches(joint: bool) -> tuple[list[int], bool]:
    """What the backend has been given for units of three sections."""
    group, rank, world = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    manager = compat._coalescing_manager
    if not joint:
        compat._coalescing_manager = None
    try:
        gathers = [(torch.zeros(world * size), torch.full((size,), float(rank))) for size in (1, 3, 2)]
        sums = [(torch.zeros(size), torch.arange(float(world * size))) for size in (1, 3, 2)]
        pending = [native.all_gather(gathers, group), native.reduce_scatter(sums, group)]
        launched = [len(works._works) for works in pending]
        for works in pending:
            works.wait()
    finally:
        compat._coalescing_manager = manager
    right = [torch.equal(full, torch.arange(float(world)).repeat_interleave(s.numel())) for full, s in gathers]
    right += [torch.equal(out, world * full[rank * out.numel() : (rank + 1) * out.numel()]) for out, full in sums]
    return launched, all(right)


def test_several_sections_are_one_launch() -> None:
    assert distributed_c10d._coalescing_manager is compat._coalescing_manager
    assert run_ranks(launches, 2, True) == [([1, 1], True)] * 2
    # Where torch cannot join them:
    assert run_ranks(launches, 2, False) == [([3, 3], True)] * 2


def moved() -> tuple[list[float], list[float], list[float]]:
    rank, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    total = torch.tensor([[1.0, 1e8], [1e8, 1.0], [-1e8, -1e8]])[rank].clone()
    native.all_reduce(total, group).wait()
    word = torch.full((2,), float(rank))
    native.broadcast(word, 1, group).wait()
    sizes = [[0, 2, 1], [3, 0, 0], [1, 1, 2]]
    outgoing, incoming = sizes[rank], [row[rank] for row in sizes]
    given = torch.tensor([10.0 * rank + peer for peer in range(world) for _ in range(outgoing[peer])])
    output = torch.zeros(sum(incoming))
    native.all_to_all(output, given, incoming, outgoing, group).wait()
    return total.tolist(), word.tolist(), output.tolist()


def test_small_sums_broadcasts_and_exchanges() -> None:
    assert run_ranks(moved, 3) == [
        ([0.0, 0.0], [1.0, 1.0], [10.0, 10.0, 10.0, 20.0]),
        ([0.0, 0.0], [1.0, 1.0], [1.0, 1.0, 21.0]),
        ([0.0, 0.0], [1.0, 1.0], [2.0, 22.0, 22.0]),
    ]


def test_collectives_of_a_stream_of_their_own_run_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for each of them there needs no further stream and no events of the backend."""
    seen: list[tuple[str, bool]] = []
    recorder = Recorder()

    def noted(out: torch.Tensor, own: torch.Tensor, *, group: Any, async_op: bool) -> None:
        seen.append((recorder.stream, async_op))

    monkeypatch.setattr(native, "all_gather_single", noted)
    with imagined(2, 0):
        pairs = [(torch.zeros(4), torch.zeros(2))]
        streams = Runner(recorder, waits_on_host=False, name="gathers", limit=timedelta(seconds=1))
        streams.start([lambda: native.all_gather(pairs, dist.group.WORLD)]).wait()
        native.all_gather(pairs, dist.group.WORLD).wait()
    assert seen == [("gathers", False), ("compute", True)]
