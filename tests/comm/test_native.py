"""Collectives of the backend itself, here with Gloo's own: values, bits, bytes on the wire, joint launches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise import compat
from shardwise.comm import native
from shardwise.comm.collective_queue import CollectiveQueue
from shardwise.errors import PeerLostError
from tests.comm.values import COPIED, RECORD, SIZES, SUMMED, on_group, ordered_sum, same_bits, values
from tests.device.recorded import imagined
from tests.device.recording import Recorder
from tests.harness import RankFailure, on_ranks, run_ranks

Layout = list[tuple[int, torch.dtype, torch.dtype]]
"""(elements of a shard, dtype of the wire, dtype of the sum) of each pair."""

WORLD: Any = None
FP32, BF16, FP64 = torch.float32, torch.bfloat16, torch.float64


def pairs_of(layout: Layout, rank: int | None = None) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(dist.get_rank() if rank is None else rank)
    world = dist.get_world_size()
    return [
        (torch.full((size,), 0.5, dtype=out), torch.randn(world * size, generator=generator).to(wire))
        for size, wire, out in layout
    ]


def by_hand(layout: Layout, accumulate: bool) -> list[torch.Tensor]:
    ranks = [pairs_of(layout, rank) for rank in range(dist.get_world_size())]
    found = []
    for number, (size, _, dtype) in enumerate(layout):
        own = slice(dist.get_rank() * size, (dist.get_rank() + 1) * size)
        before = ranks[0][number][0] if accumulate else None
        found.append(ordered_sum([pairs[number][1][own] for pairs in ranks], dtype, before))
    return found


def reduced(
    layout: Layout, accumulate: bool, ordered: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[Any]]:
    """The sums, those formed by hand in rank order, and the (dtype, elements) of the buffers made."""
    ours = pairs_of(layout)
    pending = on_group(ordered=ordered).reduce_scatter(ours, accumulate, RECORD)
    scratch = [(buffer.dtype, buffer.numel()) for buffer in pending.scratch]
    pending.wait()
    pending.wait()
    assert not pending.scratch
    return [out for out, _ in ours], by_hand(layout, accumulate), scratch


NARROW: Layout = [(5, BF16, FP32), (0, BF16, FP32), (7, BF16, FP32)]
SAME: Layout = [(4, FP32, FP32), (3, FP64, FP64)]


@pytest.mark.parametrize(
    ("world", "layout", "ordered", "plain", "accumulated"),
    [
        # The received buffers are as narrow as those sent; no tensor is widened before it is sent.
        (3, NARROW, False, [(BF16, 15), (BF16, 21)], [(BF16, 15), (BF16, 21)]),
        (3, NARROW, True, [(BF16, 15), (BF16, 21)], [(BF16, 15), (BF16, 21)]),
        (3, SAME, True, [(FP32, 12), (FP64, 9)], [(FP32, 12), (FP64, 9)]),
        # Sums go straight to their place; two terms have one order.
        (2, SAME, False, [], [(FP32, 4), (FP64, 3)]),
    ],
)
def test_sums_are_formed_in_rank_order_in_the_dtype_of_the_sum(
    world: int, layout: Layout, ordered: bool, plain: list[Any], accumulated: list[Any]
) -> None:
    for accumulate, expected in ((False, plain), (True, accumulated)):
        for ours, theirs, scratch in run_ranks(reduced, world, layout, accumulate, ordered):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
            assert scratch == expected


def widened(accumulate: bool) -> tuple[list[torch.Tensor], list[torch.Tensor], list[Any]]:
    layout = [(5, BF16, FP32), (0, BF16, FP32), (4, FP32, FP32)]
    ours = pairs_of(layout)
    with mock.patch.object(native, "exchanges", lambda wire, total, world, per_node: (world, per_node) != (2, 1)):
        pending = on_group(per_node=1).reduce_scatter(ours, accumulate, RECORD)
    scratch = [(buffer.dtype, buffer.numel()) for buffer in pending.scratch]
    pending.wait()
    return [out for out, _ in ours], by_hand(layout, accumulate), scratch


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


def test_several_tensors_are_one_launch_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[Any, ...]] = []

    @contextlib.contextmanager
    def joined(group: Any, device: torch.device | None, *, async_ops: bool) -> Iterator[str]:
        launched.append((device, async_ops))
        yield "all"

    def op(out: torch.Tensor, own: torch.Tensor, *, group: Any, async_op: bool) -> str:
        launched.append((out.numel(), async_op))
        return "each"

    pairs = [(torch.zeros(2 * size, device="meta"), torch.zeros(size, device="meta")) for size in (1, 3)]
    monkeypatch.setattr(compat, "_coalescing_manager", joined)
    monkeypatch.setattr(compat, "_captured", (op,))
    assert compat.launch_together(op, pairs, WORLD) == ["all"]
    assert launched == [(None, True), (2, True), (6, True)]
    # Where torch cannot join them, and on the CPU:
    monkeypatch.setattr(compat, "_coalescing_manager", None)
    assert compat.launch_together(op, pairs, WORLD) == ["each", "each"]
    monkeypatch.setattr(compat, "_coalescing_manager", joined)
    assert compat.launch_together(op, [*map(empty_like, pairs)], WORLD) == ["each"] * 2


def empty_like(pair: native.Pair) -> native.Pair:
    return torch.zeros(pair[0].shape), torch.zeros(pair[1].shape)


@on_ranks(3)
def test_small_sums_broadcasts_and_exchanges() -> None:
    rank, world, backend = dist.get_rank(), dist.get_world_size(), on_group()
    total = torch.tensor([[1.0, 1e8], [1e8, 1.0], [-1e8, -1e8]])[rank].clone()
    backend.all_reduce(total, RECORD).wait()
    word = torch.full((2,), float(rank))
    backend.broadcast(word, 1, RECORD).wait()
    sizes = [[0, 2, 1], [3, 0, 0], [1, 1, 2]]
    outgoing, incoming = sizes[rank], [row[rank] for row in sizes]
    given = torch.tensor([10.0 * rank + peer for peer in range(world) for _ in range(outgoing[peer])])
    output = torch.zeros(sum(incoming))
    backend.all_to_all(output, given, incoming, outgoing, RECORD).wait()
    assert total.tolist() == [0.0, 0.0] and word.tolist() == [1.0, 1.0]
    assert output.tolist() == [[10.0, 10.0, 10.0, 20.0], [1.0, 1.0, 21.0], [2.0, 22.0, 22.0]][rank]


def test_collectives_of_a_stream_of_their_own_run_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for each of them there needs no further stream and no events of the backend."""
    seen: list[tuple[str, bool]] = []
    recorder = Recorder()

    def noted(out: torch.Tensor, own: torch.Tensor, *, group: Any, async_op: bool) -> None:
        seen.append((recorder.stream, async_op))

    monkeypatch.setattr(native, "all_gather_single", noted)
    with imagined(2, 0):
        pairs = [(torch.zeros(4), torch.zeros(2))]
        streams = CollectiveQueue(recorder, waits_on_host=False, name="gathers", limit=timedelta(seconds=1))
        streams.start([lambda: on_group().all_gather(pairs, RECORD)]).wait()
        on_group().all_gather(pairs, RECORD).wait()
    assert seen == [("gathers", False), ("compute", True)]


# -- any dtype, size and number of ranks -------------------------------------------------------------------------------


def gather_case(layout: list[tuple[int, torch.dtype]], in_place: bool) -> list[torch.Tensor]:
    rank, world = dist.get_rank(), dist.get_world_size()
    pairs = []
    for salt, (size, dtype) in enumerate(layout):
        full, shard = torch.zeros(world * size, dtype=dtype), values(rank, size, dtype, salt)
        if in_place:
            shard = full[rank * size : (rank + 1) * size].copy_(shard)
        pairs.append((full, shard))
    on_group().all_gather(pairs, RECORD).wait()
    return [full for full, _ in pairs]


@settings(max_examples=12)
@given(
    world=st.integers(1, 4),
    layout=st.lists(st.tuples(st.sampled_from(SIZES), st.sampled_from(COPIED)), max_size=4),
    in_place=st.booleans(),
)
def test_all_gather_equals_concatenation(world: int, layout: list[tuple[int, torch.dtype]], in_place: bool) -> None:
    results = run_ranks(gather_case, world, layout, in_place)
    for salt, (size, dtype) in enumerate(layout):
        expected = torch.cat([values(rank, size, dtype, salt) for rank in range(world)])
        assert all(same_bits(result[salt], expected) for result in results)


def reduce_case(sizes: list[int], wire: torch.dtype, dtype: torch.dtype, accumulate: bool, in_place: bool) -> Any:
    rank, world = dist.get_rank(), dist.get_world_size()
    pairs, expected = [], []
    for salt, size in enumerate(sizes):
        own = slice(rank * size, (rank + 1) * size)
        full = values(rank, world * size, wire, salt)
        out = full[own] if in_place else values(rank + 50, size, dtype, salt)
        terms = [values(peer, world * size, wire, salt)[own] for peer in range(world)]
        expected.append(ordered_sum(terms, dtype, out.clone() if accumulate else None))
        pairs.append((out, full))
    on_group(ordered=True).reduce_scatter(pairs, accumulate, RECORD).wait()
    return [out for out, _ in pairs], expected


@settings(max_examples=12)
@given(
    world=st.integers(1, 4),
    sizes=st.lists(st.sampled_from(SIZES), min_size=1, max_size=3),
    wire=st.sampled_from(SUMMED),
    dtype=st.sampled_from([FP32, FP64]),
    accumulate=st.booleans(),
)
def test_ordered_sums_of_any_dtype(
    world: int, sizes: list[int], wire: torch.dtype, dtype: torch.dtype, accumulate: bool
) -> None:
    for found, expected in run_ranks(reduce_case, world, sizes, wire, dtype, accumulate, False):
        assert all(same_bits(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("accumulate", [False, True])
def test_ordered_sums_into_the_own_range_of_the_input(accumulate: bool) -> None:
    for found, expected in run_ranks(reduce_case, 3, [native.CHUNK + 7, 5], FP32, FP32, accumulate, True):
        assert all(same_bits(one, other) for one, other in zip(found, expected, strict=True))


SHAPES: list[tuple[int, ...]] = [(), (5,), (7, 3)]


def small(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return values(rank, torch.Size(shape).numel(), dtype).reshape(shape)


@pytest.mark.parametrize("dtype", COPIED)
@on_ranks(3)
def test_small_sums_and_broadcasts_of_any_dtype_and_layout(dtype: torch.dtype) -> None:
    backend = on_group()
    for shape in SHAPES:
        both = [small(dist.get_rank(), shape, dtype) for _ in range(2)]
        if len(shape) == 2:
            both = [tensor.t().contiguous().t() for tensor in both]  # not contiguous
        backend.all_reduce(both[0], RECORD).wait()
        backend.broadcast(both[1], 1, RECORD).wait()
        terms = [small(rank, shape, dtype) for rank in range(3)]
        expected = terms[0].to(FP32 if dtype in (BF16, torch.float16) else dtype)
        for term in terms[1:]:
            expected = expected + term
        assert same_bits(both[0], expected.to(dtype)) and same_bits(both[1], terms[1])


class Failing(dist.Work):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def wait(self, timeout: timedelta | None = None) -> bool:
        raise self.error


def test_errors_of_the_group_name_lost_peers_and_those_of_the_device_stay_what_they_are() -> None:
    for error in (RuntimeError("Timed out waiting 1ms"), dist.DistBackendError("NCCL communicator was aborted")):
        with pytest.raises(PeerLostError) as lost:
            native.Works([Failing(error)]).wait()
        assert lost.value.__cause__ is error and lost.value.timed_out == ("Timed out" in str(error))
    for error in (torch.OutOfMemoryError("CUDA out of memory"), torch.AcceleratorError("CUDA error: assert")):
        with pytest.raises(type(error)):
            native.Works([Failing(error)]).wait()


def leave_early() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank 1 has had enough")
    full = torch.zeros(200)
    on_group().all_gather([(full, full[:100])], RECORD).wait()


def test_a_rank_that_leaves_ends_the_others_with_an_error_of_this_library() -> None:
    with pytest.raises(RankFailure, match="rank 1 has had enough") as caught:
        run_ranks(leave_early, 2)
    assert [(f.rank, f.kind) for f in caught.value.failures] == [(1, "ValueError"), (0, PeerLostError.__name__)]
