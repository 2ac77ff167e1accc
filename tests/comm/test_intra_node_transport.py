"""Exchanges through each other's memory: values and bits, whose turn it is, and what happens when a rank is gone."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import threading
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.comm import intra_node_transport as transport
from shardwise.comm.communicator import Communicator
from shardwise.comm.ledger import Ledger
from shardwise.errors import PeerLostError, UsageError
from tests.comm.test_native import LAYOUTS, Layout, check_gather, gathered
from tests.comm.values import RECORD, SIZES, SUMMED, on_group, same_bits, values
from tests.harness import RankFailure, on_ranks, run_ranks, thorough
from tests.harness.training import ADAMW, engine_of

CPU = torch.device("cpu")


def possible() -> bool:
    comm = Communicator(None, Ledger(), CPU)
    found = comm.transport == "memory"
    comm.destroy()
    return found


@pytest.fixture(scope="module", autouse=True)
def _allowed_here() -> None:
    if not all(run_ranks(possible, 2)):
        reason = "the system does not let processes read each other's memory"
        if os.environ.get("SHARDWISE_TESTS_NEED_PEER_MEMORY") == "1":  # as in .ci/run: nothing else tries it
            pytest.fail(reason)
        pytest.skip(reason)


def communicator() -> Communicator:
    comm = Communicator(None, Ledger(), CPU)
    assert comm.transport == "memory"
    return comm


# -- values ------------------------------------------------------------------------------------------------------------


def gather(layout: Layout, in_place: bool) -> list[torch.Tensor]:
    comm = communicator()
    found = gathered(layout, in_place, lambda pairs: comm.all_gather(pairs, "test"))
    comm.destroy()
    return found


@settings(max_examples=8)
@given(world=st.integers(2, 4), layout=LAYOUTS, in_place=st.booleans())
def test_all_gather_equals_concatenation(world: int, layout: Layout, in_place: bool) -> None:
    check_gather(gather, world, layout, in_place)


def reduce_both_ways(
    layout: list[tuple[int, torch.dtype, torch.dtype]], accumulate: bool, own: bool
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return what memory and messages give for the same pairs."""
    comm = communicator()
    results: list[list[torch.Tensor]] = []
    for way in ("memory", "messages"):
        pairs = []
        for salt, (size, dtype, out_dtype) in enumerate(layout):
            full = values(comm.rank, comm.world * size, dtype, salt)
            out = values(comm.rank, size, out_dtype, salt + 7)
            if own and dtype == out_dtype:
                out = full[comm.rank * size : (comm.rank + 1) * size]
            pairs.append((out, full))
        if way == "memory":
            comm.reduce_scatter(pairs, "test", accumulate=accumulate).wait()
        else:
            assert dist.group.WORLD is not None
            on_group(ordered=True).reduce_scatter(pairs, accumulate, RECORD).wait()
        results.append([out for out, _ in pairs])
    comm.destroy()
    return list(zip(*results, strict=True))


@settings(max_examples=8)
@given(
    world=st.integers(2, 4),
    layout=st.lists(
        st.tuples(
            st.sampled_from([*SIZES, transport.CHUNK + 1]),
            st.sampled_from(SUMMED),
            st.sampled_from([torch.float32, torch.float64]),
        ),
        max_size=3,
    ),
    accumulate=st.booleans(),
    own=st.booleans(),
)
def test_reduce_scatter_has_the_bits_of_that_through_messages(
    world: int, layout: list[tuple[int, torch.dtype, torch.dtype]], accumulate: bool, own: bool
) -> None:
    for pairs in run_ranks(reduce_both_ways, world, layout, accumulate, own):
        for through_memory, through_messages in pairs:
            assert same_bits(through_memory, through_messages)


# -- whose turn it is --------------------------------------------------------------------------------------------------


@on_ranks(3)
def test_ranks_may_wait_in_different_orders() -> None:
    comm = communicator()
    fulls = [torch.zeros(comm.world * 5) for _ in range(6)]
    handles = [
        comm.all_gather([(full, torch.full((5,), 10.0 * n + comm.rank))], f"{n}") for n, full in enumerate(fulls)
    ]
    generator = torch.Generator().manual_seed(comm.rank)
    for n in torch.randperm(6, generator=generator).tolist():
        handles[n].wait()
        handles[n].wait()
    comm.destroy()
    for n, full in enumerate(fulls):
        assert full.tolist() == [10.0 * n + rank for rank in range(3) for _ in range(5)]


@on_ranks(2)
def test_a_forgotten_exchange_is_completed() -> None:
    comm = communicator()
    for n in range(20):
        # Nobody holds tensors or handles any more when the slower rank reads.
        comm.all_gather([(torch.zeros(2 * 50_000), torch.full((50_000,), float(n)))], f"{n}")
        gc.collect()
        if comm.rank == 1:
            time.sleep(0.01)
    full = torch.zeros(2)
    comm.all_gather([(full, torch.full((1,), 1.0 + comm.rank))], "last").wait()
    comm.destroy()
    assert full.sum().item() == 3.0


@on_ranks(2)
def test_more_exchanges_than_a_socket_holds() -> None:
    comm = communicator()
    if comm.rank == 1:
        time.sleep(0.5)  # the sockets of the others fill up
    fulls = [torch.zeros(2) for _ in range(3000)]
    handles = [comm.all_gather([(full, torch.full((1,), n + 0.5))], f"{n}") for n, full in enumerate(fulls)]
    for handle in handles:
        handle.wait()
    comm.destroy()
    assert all(full.tolist() == [n + 0.5] * 2 for n, full in enumerate(fulls))


@pytest.mark.parametrize("stage", [thorough(0), 2])
@on_ranks(3)
def test_one_rank_evaluates_while_the_others_wait_elsewhere(stage: int) -> None:
    begun = time.monotonic()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    engine = engine_of(model, stage, ADAMW)
    engine.backward(engine(torch.ones(2, 64)).sum())
    engine.step()
    # Updated parameters are on their way. Rank 0 uses them, while the others wait in the script's own barrier.
    loss = engine(torch.ones(2, 64)).sum().item() if dist.get_rank() == 0 else 0.0
    dist.barrier()
    assert dist.get_rank() or engine(torch.ones(2, 64)).sum().item() == loss
    assert time.monotonic() - begun < 60


@on_ranks(2)
def test_the_thread_sums_what_requires_a_gradient() -> None:
    """Both ranks are elsewhere while their exchange is summed, by the thread that looks after it."""
    comm = communicator()
    for inference in (True, False):  # the second exchange has the scratch memory of the first
        with torch.inference_mode(inference):
            full = (torch.arange(4.0) * (comm.rank + 1)).requires_grad_(not inference)  # as an activation has it
            own = torch.zeros(2, requires_grad=not inference)
            handle = comm.reduce_scatter([(own, full)], "test", accumulate=True)
            time.sleep(0.5)
            handle.wait()
        assert own.tolist() == [[0.0, 3.0], [6.0, 9.0]][comm.rank]
    comm.destroy()


# -- missing ranks -----------------------------------------------------------------------------------------------------


def left_alone() -> None:
    comm = communicator()
    comm.barrier()
    if comm.rank == 1:
        os._exit(3)
    begun = time.monotonic()
    try:
        comm.all_gather([(torch.zeros(2), torch.ones(1))], "lonely").wait()
    finally:
        assert time.monotonic() - begun < 20


def test_a_rank_that_has_gone_is_noticed_at_once() -> None:
    with pytest.raises(RankFailure, match=r"ranks \[0\] failed afterwards"):
        run_ranks(left_alone, 2)


@on_ranks(2, init=False)
def test_the_groups_limit_holds() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=1))
    comm, store = communicator(), dist.distributed_c10d._get_default_store()
    comm.barrier()
    if comm.rank == 0:
        with pytest.raises(PeerLostError, match=r"rank 1.*reduce_scatter 'early'"):
            comm.reduce_scatter([(torch.zeros(1), torch.ones(2))], "early").wait()
        store.set("named", "")
    else:
        store.wait(["named"], timedelta(seconds=20))
    comm.destroy()


# -- meeting -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wish", "refusing", "memory", "error"),
    [
        ("", False, True, ""),
        ("memory", False, True, ""),
        ("messages", False, False, ""),
        ("", True, False, ""),
        ("memory", True, False, "SHARDWISE_TRANSPORT=memory"),
        ("memroy", False, False, "SHARDWISE_TRANSPORT='memroy'"),
    ],
)
@on_ranks(3)
def test_what_is_used(wish: str, refusing: bool, memory: bool, error: str) -> None:
    os.environ[transport.VARIABLE] = wish  # the harness puts it back
    refuses = mock.patch.object(transport, "read_tensor", side_effect=PermissionError("not allowed"))
    with refuses if refusing and dist.get_rank() == 1 else contextlib.nullcontext():
        with pytest.raises(UsageError, match=error) if error else contextlib.nullcontext():
            comm = Communicator(None, Ledger(), CPU)
        if not error:
            out = torch.zeros(2)
            comm.reduce_scatter([(out, torch.ones(2 * comm.world))], "works").wait()
            assert out.tolist() == [comm.world] * 2 and (comm.transport == "memory") is memory
            comm.destroy()


def test_a_connection_to_another_process_than_announced_is_refused(monkeypatch) -> None:
    """Both ranks are this process here; the announced number is that of another process."""
    monkeypatch.setattr(transport, "_CONNECTING", timedelta(seconds=0.5))
    listener = transport._listener()
    assert listener is not None
    cards = [{"process": os.getpid() + 1, "socket": listener.getsockname().decode("latin-1")}] * 2
    found: list[dict[int, socket.socket] | None] = []
    caller = threading.Thread(target=lambda: found.append(transport._call_all(1, cards, listener)))
    caller.start()
    called = transport._call_all(0, cards, listener)
    caller.join()
    listener.close()
    assert called is None and found == [None]


def test_memory_that_does_not_hold_the_announced_proof_is_not_taken_for_a_peers() -> None:
    proof = torch.arange(transport._PROOF_BYTES, dtype=torch.uint8)
    card = {"process": os.getpid(), "address": proof.data_ptr(), "proof": bytes(proof.tolist()).hex()}
    assert transport._readable(card)
    proof[3] += 1  # as in a container where the number is that of another process
    assert not transport._readable(card)
    assert not transport._readable({**card, "address": 8})
