"""Collectives of the backend itself, here with Gloo's own: values, bits, joint launches."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.comm import native
from shardwise.errors import PeerLostError
from tests.comm.values import COPIED, OTHERS, RECORD, SIZES, SUMMED, on_group, ordered_sum, same_bits, values
from tests.harness import RankFailure, on_ranks, run_ranks

FP32, BF16, FP64 = torch.float32, torch.bfloat16, torch.float64


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
    backend.all_to_all([(output, given, incoming, outgoing)], RECORD).wait()
    assert total.tolist() == [0.0, 0.0] and word.tolist() == [1.0, 1.0]
    assert output.tolist() == [[10.0, 10.0, 10.0, 20.0], [1.0, 1.0, 21.0], [2.0, 22.0, 22.0]][rank]


@pytest.mark.parametrize("dtype", OTHERS)
@on_ranks(2)
def test_dtypes_that_the_backend_cannot_send_are_copied_as_bytes(dtype: torch.dtype) -> None:
    rank, backend = dist.get_rank(), on_group()
    own, scalar, table = values(rank, 5, dtype), values(rank, 1, dtype).view(()), values(rank, 6, dtype).view(2, 3).t()
    first = values(0, 6, dtype).view(2, 3).t()
    full, output = torch.zeros(10).to(dtype), torch.zeros(4 if rank else 6).to(dtype)
    backend.all_gather([(full, own), (torch.empty(0, dtype=dtype), own[:0])], RECORD).wait()
    backend.broadcast(scalar, 1, RECORD).wait()
    backend.broadcast(table, 0, RECORD).wait()
    sizes = [2, 2] if rank else [3, 3], [3, 2]
    backend.all_to_all([(output, own, *sizes), (own[:0], own[:0], [0, 0], [0, 0])], RECORD).wait()
    both = [values(peer, 5, dtype) for peer in range(2)]
    expected = [(one[3:] if rank else one[:3]).float() for one in both]
    assert torch.equal(full.float(), torch.cat([one.float() for one in both]))
    assert torch.equal(scalar.float(), values(1, 1, dtype)[0].float()) and torch.equal(table.float(), first.float())
    assert torch.equal(output.float(), torch.cat(expected))


# -- any dtype, size and number of ranks -------------------------------------------------------------------------------


Layout = list[tuple[int, torch.dtype]]
LAYOUTS = st.lists(st.tuples(st.sampled_from(SIZES), st.sampled_from(COPIED)), max_size=4)


def gathered(layout: Layout, in_place: bool, gather: Callable[[list[Any]], Any]) -> list[torch.Tensor]:
    """Gather tensors of all ranks by a function."""
    rank, world = dist.get_rank(), dist.get_world_size()
    pairs = []
    for salt, (size, dtype) in enumerate(layout):
        full, shard = torch.zeros(world * size, dtype=dtype), values(rank, size, dtype, salt)
        if in_place:
            shard = full[rank * size : (rank + 1) * size].copy_(shard)
        pairs.append((full, shard))
    gather(pairs).wait()
    return [full for full, _ in pairs]


def gather_case(layout: Layout, in_place: bool) -> list[torch.Tensor]:
    return gathered(layout, in_place, lambda pairs: on_group().all_gather(pairs, RECORD))


@settings(max_examples=12)
@given(world=st.integers(1, 4), layout=LAYOUTS, in_place=st.booleans())
def test_all_gather_equals_concatenation(world: int, layout: Layout, in_place: bool) -> None:
    check_gather(gather_case, world, layout, in_place)


def check_gather(case: Callable[..., list[torch.Tensor]], world: int, layout: Layout, in_place: bool) -> None:
    """Compare what ranks gather with the concatenation of their values."""
    results = run_ranks(case, world, layout, in_place)
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
