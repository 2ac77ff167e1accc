"""NCCL on one rank, which sends to itself: it takes what `shardwise.comm.native` gives it, and the values are right."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.comm import api, groups, native
from shardwise.comm.communicator import Communicator
from shardwise.comm.ledger import Ledger, follow_devices
from shardwise.comm.rank_status import Here, oldest_under_way
from shardwise.parallel.tensor.entry import copy_first
from tests.comm.values import RECORD, on_group
from tests.gpu.forced import start_group
from tests.gpu.standin import rehearsing

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
SIZES = (1, 5, 64, 1 << 16)
"""Several pairs are launched as one where torch can join them."""


@pytest.fixture(scope="module")
def group() -> dist.ProcessGroup:
    start_group()
    device = torch.device("cuda", torch.cuda.current_device())
    return groups.new_group([0], timedelta(seconds=60), "nccl", device, "test")


def values(size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(size, device="cuda").remainder(251).to(dtype)


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16, torch.uint8, torch.int64])
@pytest.mark.parametrize("in_place", [False, True])
def test_all_gather(group: dist.ProcessGroup, dtype: torch.dtype, in_place: bool) -> None:
    for sizes in (SIZES[:1], SIZES, (0, *SIZES)):
        shards = [values(size, dtype) for size in sizes]
        fulls = [shard if in_place else torch.zeros_like(shard) for shard in shards]
        pairs = [(full, full[: full.numel()] if in_place else own) for full, own in zip(fulls, shards, strict=True)]
        on_group(group).all_gather(pairs, RECORD).wait()
        assert all(torch.equal(full, values(full.numel(), dtype)) for full in fulls)


@pytest.mark.parametrize(("wire", "total"), [(FP32, FP32), (BF16, FP32), (FP16, FP32), (BF16, BF16), (FP32, BF16)])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("exchanged", [False, True])
def test_reduce_scatter(
    group: dist.ProcessGroup,
    wire: torch.dtype,
    total: torch.dtype,
    accumulate: bool,
    ordered: bool,
    exchanged: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not exchanged:
        if wire.itemsize > total.itemsize:
            pytest.skip("wider wires are always exchanged")
        monkeypatch.setattr(native, "exchanges", lambda *_: False)
    pairs = [(torch.full((size,), 2.0, dtype=total, device="cuda"), values(size, wire)) for size in (0, *SIZES)]
    pending = on_group(group, ordered=ordered).reduce_scatter(pairs, accumulate, RECORD)
    pending.wait()
    for out, full in pairs:
        assert torch.equal(out, full.to(total) + (2.0 if accumulate else 0.0))


def test_sums_in_place(group: dist.ProcessGroup) -> None:
    """Of several pairs, the output of some is where the input lies."""
    whole = values(256, FP32)
    pairs = [(whole[:256], whole), (torch.zeros(8, device="cuda"), values(8, FP32))]
    on_group(group).reduce_scatter(pairs, False, RECORD).wait()
    assert torch.equal(whole, values(256, FP32))


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16, torch.float64, torch.int64])
def test_small_and_large_sums(group: dist.ProcessGroup, dtype: torch.dtype) -> None:
    for shape in ((), (1,), (3, 5)):
        tensor = torch.full(shape, 3, dtype=dtype, device="cuda")
        on_group(group).all_reduce(tensor, RECORD).wait()
        on_group(group).sum_in_place(tensor, RECORD).wait()
        assert torch.equal(tensor, torch.full(shape, 3, dtype=dtype, device="cuda"))


@pytest.mark.parametrize("dtype", [FP32, BF16, torch.uint8, torch.int64])
def test_broadcast_and_all_to_all(group: dist.ProcessGroup, dtype: torch.dtype) -> None:
    tensor = values(100, dtype)
    on_group(group).broadcast(tensor, 0, RECORD).wait()
    assert torch.equal(tensor, values(100, dtype))
    out = torch.zeros_like(tensor)
    on_group(group).all_to_all([(out[:7], tensor[3:10], [7], [7])], RECORD).wait()
    on_group(group).all_to_all([(out[:0], tensor[:0], [0], [0])], RECORD).wait()
    assert torch.equal(out[:7], tensor[3:10])
    swaps = [(torch.zeros_like(given), given, [given.numel()], [given.numel()]) for given in (tensor, tensor[:9])]
    on_group(group).all_to_all(swaps, RECORD).wait()
    assert all(torch.equal(output, given) for output, given, *_ in swaps)


def test_the_end_of_a_collective_is_seen_and_nothing_holds_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    start_group()
    monkeypatch.setattr(Communicator, "sends", True)
    comm = Communicator(None, Ledger(), torch.device("cuda", torch.cuda.current_device()))
    follow_devices(True)
    try:
        own = torch.ones(1 << 20, device="cuda")
        before = torch.cuda.memory_allocated()
        for _ in range(20):
            comm.all_gather([(torch.empty_like(own), own)], "unit").wait()
        assert rehearsing() or torch.cuda.memory_allocated() - before < own.nbytes
        torch.cuda.synchronize()
        until = time.monotonic() + 30
        while oldest_under_way() is not None:
            assert time.monotonic() < until
    finally:
        follow_devices(False)
        comm.destroy()


def test_a_collective_of_the_script_is_followed() -> None:
    start_group()
    follow_devices(True)
    try:
        if not rehearsing():
            torch.cuda._sleep(10**9)
        api.all_reduce(torch.ones(4, device="cuda"))
        if not rehearsing():
            assert Here()().what == "torch.distributed.all_reduce()"
        torch.cuda.synchronize()
        assert not Here()().waits
    finally:
        follow_devices(False)


def test_a_communicator_of_one_rank_that_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    start_group()
    monkeypatch.setattr(Communicator, "sends", True)
    comm = Communicator(None, Ledger(), torch.device("cuda", torch.cuda.current_device()))
    assert comm.exchange({"a": [1, "x" * 2000]}, "long") == [{"a": [1, "x" * 2000]}]
    assert comm.share_object({"b": 2}, "shared") == {"b": 2}
    assert len(comm.nodes()) == 1
    flat = values(64, BF16)
    comm.sum_large(flat, "large")
    comm.barrier()
    assert torch.equal(flat, values(64, BF16))
    comm.destroy()


def test_values_of_the_first_rank_reach_tensors_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    start_group()
    monkeypatch.setattr(Communicator, "sends", True)
    comm = Communicator(None, Ledger(), torch.device("cuda", torch.cuda.current_device()))
    send = comm.broadcast

    def of_first(tensor: torch.Tensor, *rest: Any) -> Any:
        assert tensor.device.type == "cuda"
        return send(tensor.zero_(), *rest)

    monkeypatch.setattr(comm, "broadcast", of_first)
    weight = torch.nn.Parameter(torch.ones(2, 3, device="cpu").t())
    mask, here = torch.ones(2, dtype=torch.bool, device="cpu"), torch.ones((), device="cuda")
    try:
        copy_first([("weight", weight), ("mask", mask), ("here", here)], comm)
    finally:
        comm.destroy()
    assert weight.device.type == mask.device.type == "cpu"
    assert not weight.any() and not mask.any() and not here.any()
