"""Connections between ranks that strangers cannot enter: who gets in while the port is open, and that it closes."""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from shardwise.comm import p2p, rendezvous
from shardwise.comm.communicator import Communicator
from shardwise.comm.ledger import Ledger
from shardwise.errors import PeerLostError
from shardwise.launch.comm_measure import Pairs, connect
from tests.harness import run_ranks

CPU = torch.device("cpu")


class Group:
    """Stands for a communicator; its ranks are threads of this process."""

    def __init__(self, world: int, limit: float = 30.0, device: torch.device = CPU) -> None:
        self.world = world
        self.device = device
        self.meeting = threading.Barrier(world)
        self.store = dist.HashStore()
        self.secret: Any = None
        self.limit = timedelta(seconds=limit)
        self.suspicious: int | None = None
        """Which rank makes another key than the rest."""

    def rank(self, rank: int) -> Any:
        return Member(self, rank)

    def run(self, call: Callable[[Any], Any]) -> list[Any]:
        """Call something on all ranks; return what each returns or raises."""
        results: list[Any] = [None] * self.world

        def one(rank: int) -> None:
            try:
                results[rank] = call(self.rank(rank))
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.world)]
        with mock.patch.object(p2p, "default_store", lambda: self.store):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return results


class Member:
    def __init__(self, group: Group, rank: int) -> None:
        self.group, self.rank, self.world, self.timeout = group, rank, group.world, group.limit
        self.device = group.device
        self.members = list(range(group.world))

    def fingerprints(self, text: str, label: str) -> list[str]:
        return [""] * self.world

    def share_object(self, value: object, label: str) -> object:
        if self.rank == 0:
            self.group.secret = value
        self.group.meeting.wait()
        name, secret = self.group.secret
        return [name, "00" * 32 if self.rank == self.group.suspicious else secret]

    def barrier(self, label: str) -> None:
        self.group.meeting.wait()

    def explain(self, error: PeerLostError, what: str, waited: float) -> PeerLostError:
        return error


class Strangers:
    """Processes of other people, which call every port as soon as it is open, and hold their connections."""

    def __init__(self) -> None:
        self.held: list[socket.socket] = []
        self.answers: list[bytes] = []
        self.ports: list[int] = []

    def call(self, port: int) -> None:
        self.ports.append(port)
        hello = struct.pack("<I", 1) + bytes(64)  # "I am rank 1", with a proof that is none
        lines = [b"GET / HTTP/1.1\r\n\r\n", b"\0" * 1000, b"\xff" * 1000, struct.pack("<Q", 1 << 40), hello]
        # More than are kept at a time say nothing, or half of something.
        lines += [b"", b"\1\0\0\0half"] * p2p._MOST_UNPROVEN
        for line in lines:
            with contextlib.suppress(OSError):
                connection = socket.create_connection(("127.0.0.1", port), 5)
                self.held.append(connection)
                connection.sendall(line)
                if line is hello:
                    connection.settimeout(5)
                    while data := connection.recv(1000):
                        self.answers.append(data)


@pytest.fixture
def strangers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Strangers]:
    found, listen = Strangers(), p2p._listen

    def crowded(host: str) -> socket.socket:
        listener = listen(host)
        port = listener.getsockname()[1]
        threading.Thread(target=found.call, args=(port,), daemon=True).start()
        time.sleep(0.1)  # the strangers come first
        return listener

    monkeypatch.setattr(p2p, "_listen", crowded)
    yield found
    for connection in found.held:
        connection.close()


def test_ranks_find_each_other_among_strangers_and_close_the_door(strangers: Strangers) -> None:
    found = Group(3).run(connect)
    for rank, connected in enumerate(found):
        assert isinstance(connected, Pairs), connected
        for peer, asking in connected.asking.items():
            asking.sendall(bytes([rank, peer]))
    for rank, connected in enumerate(found):
        for peer, answering in connected.answering.items():
            answering.setblocking(True)
            assert answering.recv(2) == bytes([peer, rank])
    # A stranger has got a random number, and nothing in return for its own.
    assert all(len(answer) == p2p._NUMBER_BYTES for answer in strangers.answers)
    for port in strangers.ports:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 1)
    for connected in found:
        connected.close()


def test_a_hello_that_was_heard_elsewhere_opens_nothing() -> None:
    """What a rank says to one peer is of no use at another, or a second time."""
    group, key = Group(3), bytes(32)
    group.meeting, group.secret = threading.Barrier(1), ("name", key.hex())
    found: dict[int, socket.socket] = {}
    selector, ended = selectors.DefaultSelector(), threading.Event()
    with mock.patch.object(p2p, "default_store", lambda: group.store):
        own = p2p.P2PConnections(group.rank(1), selector, found.__setitem__)
    where = own._listener.getsockname()

    def serve() -> None:
        while not ended.is_set():
            for ready, _ in selector.select(0.05):
                ready.data()

    thread = threading.Thread(target=serve)
    thread.start()

    def say(number_of: Callable[[bytes], bytes], rank: int, to: int) -> bytes:
        with socket.create_connection(where, 5) as connection:
            theirs, ours = number_of(connection.recv(p2p._NUMBER_BYTES)), b"n" * p2p._NUMBER_BYTES
            connection.sendall(p2p._HELLO.pack(rank, ours, p2p._proof(key, b"asks", rank, to, theirs, ours)))
            return connection.recv(100)

    assert say(lambda now: b"o" * len(now), 0, 1) == b""  # an older one
    assert say(lambda now: now, 0, 2) == b""  # for another peer
    assert say(lambda now: now, 1, 1) == b""  # from itself
    assert say(lambda now: now, 7, 1) == b""  # from nobody
    assert not found
    assert len(say(lambda now: now, 0, 1)) == p2p._NUMBER_BYTES
    deadline = time.monotonic() + 10
    while not found and time.monotonic() < deadline:  # it is noted after the answer
        time.sleep(0.01)
    assert list(found) == [0]
    assert say(lambda now: now, 0, 1) == b""  # it is there already
    ended.set()
    thread.join()
    own.close()
    selector.close()
    found[0].close()


def test_a_rank_that_is_somebody_else_is_not_believed() -> None:
    """Somebody who knows the address but not the key listens in a rank's place."""
    group = Group(2, limit=1.0)
    group.suspicious = 0
    for error in group.run(connect):
        assert isinstance(error, PeerLostError)
        assert "has not answered rank" in str(error)


# -- where -------------------------------------------------------------------------------------------------------------


def listening() -> set[str]:
    """Local addresses (hexadecimal) at which this process listens."""
    own = {str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return {row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own}


def ports_in_the_meeting() -> tuple[set[str], set[str]]:
    comm = Communicator(None, Ledger(), CPU)
    before, call = listening(), p2p._call
    while_meeting: set[str] = set()

    def calls(*args: Any) -> socket.socket:
        while_meeting.update(listening() - before)
        return call(*args)

    p2p._call = calls  # type: ignore[assignment]
    try:
        connected = connect(comm)
    finally:
        p2p._call = call
    after = listening() - before
    connected.close()
    comm.destroy()
    return while_meeting, after


def test_one_machine_listens_on_loopback_only_and_only_while_ranks_meet() -> None:
    for while_meeting, after in run_ranks(ports_in_the_meeting, 2):
        assert {address.split(":")[0] for address in while_meeting} == {"0100007F"}
        assert after == set()


def on_several_machines() -> set[str]:
    """Ranks that do not share a loopback interface, as far as they can tell."""
    p2p.machine = lambda: f"machine {dist.get_rank()}"  # type: ignore[assignment]
    p2p.own_address = lambda: f"127.0.0.{2 + dist.get_rank()}"  # type: ignore[assignment]
    try:
        comm = Communicator(None, Ledger(), CPU)
        connected = connect(comm)
        found = {connection.getpeername()[0] for connection in connected.asking.values()}
        connected.close()
        comm.destroy()
    finally:
        p2p.machine, p2p.own_address = rendezvous.machine, rendezvous.own_address
    return found


def test_ranks_announce_their_own_addresses_to_other_machines() -> None:
    assert run_ranks(on_several_machines, 3) == [
        {"127.0.0.3", "127.0.0.4"},
        {"127.0.0.2", "127.0.0.4"},
        {"127.0.0.2", "127.0.0.3"},
    ]
