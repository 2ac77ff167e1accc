"""Exchanges through each other's memory: values and bits, whose turn it is, and what happens when a rank is gone."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import shardwise
from shardwise.comm import intra_node_transport as transport
from shardwise.comm import native
from shardwise.comm.communicator import Communicator
from shardwise.comm.ledger import Ledger
from shardwise.errors import PeerLostError, UsageError
from tests.comm.values import COPIED, RECORD, SIZES, SUMMED, on_group, same_bits, values
from tests.harness import RankFailure, on_ranks, run_ranks, thorough

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
        if (
            os.environ.get("SHARDWISE_TESTS_NEED_PEER_MEMORY") == "1"
        ):  # as in .ci/run: nothing else tries this transport
            pytest.fail(reason)
        pytest.skip(reason)


def communicator() -> Communicator:
    comm = Communicator(None, Ledger(), CPU)
    assert comm.transport == "memory"
    return comm


# -- values ------------------------------------------------------------------------------------------------------------


def gather(layout: list[tuple[int, torch.dtype]], in_place: bool) -> list[torch.Tensor]:
    comm = communicator()
    pairs = []
    for salt, (size, dtype) in enumerate(layout):
        full, shard = torch.zeros(comm.world * size, dtype=dtype), values(comm.rank, size, dtype, salt)
        if in_place:
            shard = full[comm.rank * size : (comm.rank + 1) * size].copy_(shard)
        pairs.append((full, shard))
    comm.all_gather(pairs, "test").wait()
    comm.destroy()
    return [full for full, _ in pairs]


@settings(max_examples=8)
@given(
    world=st.integers(2, 4),
    layout=st.lists(st.tuples(st.sampled_from(SIZES), st.sampled_from(COPIED)), max_size=4),
    in_place=st.booleans(),
)
def test_all_gather_equals_concatenation(world: int, layout: list[tuple[int, torch.dtype]], in_place: bool) -> None:
    results = run_ranks(gather, world, layout, in_place)
    for salt, (size, dtype) in enumerate(layout):
        expected = torch.cat([values(rank, size, dtype, salt) for rank in range(world)])
        assert all(same_bits(result[salt], expected) for result in results)


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
def test_a_wait_ends_when_the_peers_have_read() -> None:
    comm = communicator()
    shard, full = torch.full((1000,), float(comm.rank)), torch.zeros(2000)
    gradient, out = torch.full((2000,), 1.0 + comm.rank), torch.zeros(1000)
    handles = [comm.all_gather([(full, shard)], "gather"), comm.reduce_scatter([(out, gradient)], "reduce")]
    if comm.rank == 1:
        time.sleep(0.5)
    for handle in handles:
        handle.wait()
    shard.fill_(-1)
    gradient.fill_(-1)
    comm.barrier()
    comm.destroy()
    assert [full.sum().item(), out.sum().item()] == [1000.0, 3000.0]


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


@on_ranks(2)
def test_a_rank_that_leaves_sends_what_waits_for_its_socket() -> None:
    """Rank 1 has all it needs, and leaves before its socket has taken what it has to say to rank 0."""
    comm = communicator()
    full = torch.zeros(2)
    near = comm._backend
    assert isinstance(near, transport.IntraNodeTransport)
    send, held = near._send, []

    def sent(peer: int, message: bytes) -> None:
        if comm.rank == 1 and message[0] == transport._RECEIPT:
            held.append(message)
        else:
            send(peer, message)

    with mock.patch.object(near, "_send", sent):
        comm.all_gather([(full, torch.ones(1) + comm.rank)], "last").wait()
    if comm.rank == 1:
        assert held
        near._unsent[0].extend(held)
    comm.destroy()
    assert full.tolist() == [1.0, 2.0]


@on_ranks(2)
def test_another_thread_launches_while_one_waits() -> None:
    comm = communicator()
    first, second = torch.zeros(2), torch.zeros(2)
    handle = comm.all_gather([(first, torch.ones(1))], "first") if comm.rank == 0 else None
    helper = threading.Thread(
        target=lambda: (time.sleep(0.3), comm.all_gather([(second, torch.ones(1))], "second", "replicate").wait())
    )
    helper.start()
    if handle is None:
        time.sleep(0.6)  # rank 0 waits meanwhile, and its thread has launched the second
        handle = comm.all_gather([(first, torch.ones(1))], "first")
    handle.wait()
    helper.join()
    comm.destroy()
    assert first.tolist() + second.tolist() == [1.0] * 4


def summed_by_the_thread(broken: bool) -> list[float]:
    """Both ranks are elsewhere while what they have launched is summed, by the thread that looks after it."""
    comm = communicator()
    full = torch.arange(4.0) * (comm.rank + 1)
    own = torch.zeros(2)
    full.requires_grad_()  # as an activation has it
    own.requires_grad_()
    refused = mock.patch.object(transport._Reduction, "_add_up", side_effect=ValueError("broken"))
    with refused if broken else torch.no_grad():
        handle = comm.reduce_scatter([(own, full)], "test")
        time.sleep(1)
        handle.wait()
    found: list[float] = own.tolist()
    comm.destroy()
    return found


def test_the_thread_sums_what_requires_a_gradient() -> None:
    assert run_ranks(summed_by_the_thread, 2, False) == [[0.0, 3.0], [6.0, 9.0]]


def test_what_fails_in_the_thread_is_told_who_waits() -> None:
    with pytest.raises(RankFailure, match="broken"):
        run_ranks(summed_by_the_thread, 2, True, timeout=60)


@pytest.mark.parametrize("stage", [thorough(0), 2])
@on_ranks(3)
def test_one_rank_evaluates_while_the_others_wait_elsewhere(stage: int) -> None:
    begun = time.monotonic()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = shardwise.initialize(model=model, config=config)
    engine.backward(engine(torch.ones(2, 64)).sum())
    engine.step()
    # Updated parameters are on their way. Rank 0 uses them, while the others wait in the script's own barrier.
    loss = engine(torch.ones(2, 64)).sum().item() if dist.get_rank() == 0 else 0.0
    dist.barrier()
    rest = engine(torch.ones(2, 64)).sum().item()
    engine.destroy()
    assert dist.get_rank() or rest == loss
    assert time.monotonic() - begun < 60


@on_ranks(2)
def test_nothing_is_left_of_a_communicator_that_nobody_has_closed() -> None:
    comm = communicator()
    reference, thread = weakref.ref(comm._backend), comm._backend._thread
    sockets = list(comm._backend._sockets.values())
    comm._backend = native.Backend()
    comm.destroy()
    del comm
    gc.collect()
    thread.join(5)
    assert reference() is None and not thread.is_alive() and [s.fileno() for s in sockets] == [-1]


# -- missing ranks -----------------------------------------------------------------------------------------------------


def left_alone(how: str) -> None:
    comm = communicator()
    comm.barrier()
    if comm.rank == 1:
        if how == "destroys":
            comm.destroy()
            time.sleep(1)
            return
        os._exit(3)
    begun = time.monotonic()
    try:
        comm.all_gather([(torch.zeros(2), torch.ones(1))], "lonely").wait()
    finally:
        assert time.monotonic() - begun < 20


@pytest.mark.parametrize(
    ("how", "told"), [("destroys", "lost rank 1 in all_gather 'lonely'"), ("dies", r"ranks \[0\] failed afterwards")]
)
def test_a_rank_that_has_gone_is_noticed_at_once(how: str, told: str) -> None:
    with pytest.raises(RankFailure, match=told):
        run_ranks(left_alone, 2, how)


@on_ranks(2, init=False)
def test_the_groups_limit_holds() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=1))
    comm = communicator()
    comm.barrier()
    if comm.rank == 0:
        with pytest.raises(PeerLostError, match=r"rank 1.*reduce_scatter 'early'"):
            comm.reduce_scatter([(torch.zeros(1), torch.ones(2))], "early").wait()
    else:
        time.sleep(2)
    comm.destroy()


ENDS = """
import sys, time, torch, shardwise
from shardwise.comm.communicator import Communicator
from shardwise.comm.ledger import Ledger
shardwise.init_distributed()
comm = Communicator(None, Ledger(), torch.device("cpu"))
full = torch.zeros(2 * 100_000)
handle = comm.all_gather([(full, torch.full((100_000,), 1.0 + comm.rank))], "last")
if comm.rank == 0:
    time.sleep(1.5)
    handle.wait()
    print("sum", int(full.sum().item()))
"""


@pytest.mark.thorough
def test_a_script_that_ends_lets_the_others_read(tmp_path: Path) -> None:
    script = tmp_path / "ends.py"
    script.write_text(ENDS)
    command = [sys.executable, "-m", "shardwise.launch", "run", "--nproc", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "sum 300000" in done.stdout


# -- meeting -----------------------------------------------------------------------------------------------------------


def used(wish: str, refusing: bool) -> tuple[bool, str]:
    before = transport.read_tensor
    comm = None
    try:
        os.environ[transport.VARIABLE] = wish
        if refusing and dist.get_rank() == 1:

            def refuse(*_: Any) -> None:
                raise PermissionError("not allowed")

            transport.read_tensor = refuse  # type: ignore[assignment]
        comm = Communicator(None, Ledger(), CPU)
        out = torch.zeros(2)
        comm.reduce_scatter([(out, torch.ones(2 * comm.world))], "works").wait()
        assert out.tolist() == [comm.world] * 2
        return comm.transport == "memory", ""
    except UsageError as error:
        return False, str(error)
    finally:
        transport.read_tensor = before
        del os.environ[transport.VARIABLE]
        if comm is not None:
            comm.destroy()


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
def test_what_is_used(wish: str, refusing: bool, memory: bool, error: str) -> None:
    for found, message in run_ranks(used, 3, wish, refusing):
        assert found is memory and bool(message) is bool(error) and error in message


_STRANGER = """
import socket, sys, time
calls = []
while len(calls) < 1000:
    call = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    call.setblocking(False)
    calls.append(call)
    try:
        call.connect("\\0" + sys.argv[1])
    except BlockingIOError:  # there is no room for any other
        break
calls[0].send((1).to_bytes(4, "little"))
print("called", flush=True)
sys.stdin.read()
"""


def test_strangers_that_call_and_hold_the_line_are_sent_away() -> None:
    """They come first, as many as there is room for, and one of them says that it is rank 1, which calls after them."""
    listener = transport._listener()
    assert listener is not None
    name = listener.getsockname().decode("latin-1")
    cards = [{"process": os.getpid(), "socket": name}] * 2
    with subprocess.Popen(
        [sys.executable, "-c", _STRANGER, name.lstrip("\0")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as stranger:
        assert stranger.stdout is not None and stranger.stdout.readline() == b"called\n"
        found: list[dict[int, socket.socket] | None] = []
        caller = threading.Thread(target=lambda: found.append(transport._call_all(1, cards, listener)))
        caller.start()
        called = transport._call_all(0, cards, listener)
        caller.join()
        assert called is not None and found[0] is not None
        found[0][0].send(b"hello")
        assert called[1].recv(16) == b"hello"
        for connection in (called[1], found[0][0], listener):
            connection.close()
        stranger.communicate()


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


def test_reading_where_nothing_is_raises() -> None:
    target = torch.zeros(4)
    with pytest.raises(OSError, match="reading 16 bytes of process"):
        transport.read_tensor(os.getpid(), 8, target)
