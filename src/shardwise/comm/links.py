"""Connections between the ranks of a group, outside of its process groups, that strangers cannot enter.

Each rank has two connections to each other rank: one on which it asks, one on which it answers. They are made at set-up
and kept, so that no port is open while a job trains. A rank proves on each that it knows a key, which is made from
random bytes of all ranks; the group tells them to each other in a collective. Each side sends a random number and gets
it back under the key (HMAC-SHA256) together with both ranks and the direction: a proof fits one connection only.

Invariants of the meeting, during which a port is open: whatever comes in before a proof has a fixed size; a connection
without a proof holds up nobody, is dropped after a few seconds, and only so many are kept; whoever is dropped may try
again. What has been proven is a connection, not each byte on it: it is as safe from somebody on the way between two
machines as the traffic of the process group itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import json
import resource
import secrets
import select
import socket
import struct
import threading
import time
from dataclasses import dataclass, field

from shardwise.comm.communicator import Communicator
from shardwise.comm.environment import LOOPBACK
from shardwise.comm.rendezvous import machine, own_address
from shardwise.errors import PeerLostError

_NUMBER_BYTES = 32
_HELLO = struct.Struct(f"<I{_NUMBER_BYTES}s{_NUMBER_BYTES}s")
"""Rank, random number and proof of whoever connects."""
_MOST_UNPROVEN = 64
_UNPROVEN_S = 5.0
"""How long a connection may take to prove itself. A rank that was too slow tries again."""
_RETRY_S = 0.05
_STEP_S = 0.2


@dataclass
class Links:
    """Connections to the other ranks of a group, by rank.

    Attributes:
        asking: those on which this rank asks (blocking).
        answering: those on which it answers (not blocking).
    """

    asking: dict[int, socket.socket] = field(default_factory=dict)
    answering: dict[int, socket.socket] = field(default_factory=dict)

    def close(self) -> None:
        """Close all; the peers are told."""
        for sockets in (self.asking, self.answering):
            while sockets:
                sockets.popitem()[1].close()


def connect(comm: Communicator) -> Links:
    """Connect the ranks of a group (all ranks call).

    Raises:
        PeerLostError: a rank has gone, or has not come within the group's limit for a collective.
    """
    _allow_files(2 * comm.world)
    one_machine = len(set(comm.fingerprints(machine(), "side_channel.machines"))) == 1
    host = LOOPBACK if one_machine else own_address()
    with _listen(host) as listener:
        card = {"host": host, "port": listener.getsockname()[1], "number": secrets.token_hex(_NUMBER_BYTES)}
        cards = comm.exchange(card, "side_channel.address")
        key = hashlib.sha256(json.dumps(cards).encode()).digest()
        meeting = _Meeting(listener, key, comm.rank, comm.world)
        links = Links(answering=meeting.found)
        deadline = time.monotonic() + comm.timeout.total_seconds()
        peer = comm.rank
        try:
            # Not all ranks begin with rank 0.
            for step in range(1, comm.world):
                peer = (comm.rank + step) % comm.world
                address = cards[peer]
                links.asking[peer] = _call((address["host"], address["port"]), key, comm.rank, peer, deadline)
            meeting.thread.join(max(0.0, deadline - time.monotonic()))
            missing = set(links.asking) - set(links.answering)
            if missing:
                peer = min(missing)
                raise TimeoutError("it has not connected")
        except OSError as error:
            meeting.stop()
            links.close()
            lost = PeerLostError(f"rank {peer} cannot be reached for the side channel")
            lost.peer, lost.timed_out, lost.__cause__ = peer, isinstance(error, TimeoutError), error
            waited = time.monotonic() - deadline + comm.timeout.total_seconds()
            raise comm.explain(lost, "the meeting of the side channel", waited) from error
        finally:
            meeting.stop()
    return links


def receive(connection: socket.socket, into: memoryview, deadline: float) -> None:
    """Fill `into` from a blocking socket.

    Raises:
        TimeoutError: `time.monotonic()` has passed the deadline.
        OSError: the connection has ended.
    """
    while into.nbytes:
        connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        count = connection.recv_into(into)
        if not count:
            raise ConnectionResetError("the connection has been closed at the other end")
        into = into[count:]


def _allow_files(more: int) -> None:
    """Let this process open that many files more, as far as the system does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and more > soft // 2:  # the rest is for others
        wanted = soft + more if hard == resource.RLIM_INFINITY else min(soft + more, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _listen(host: str) -> socket.socket:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        host = ""  # a name may lead to another address here than elsewhere
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=2048)


def _proof(key: bytes, side: bytes, asking: int, answering: int, theirs: bytes, ours: bytes) -> bytes:
    return hmac.digest(key, side + struct.pack("<II", asking, answering) + theirs + ours, "sha256")


def _call(address: tuple[str, int], key: bytes, rank: int, peer: int, deadline: float) -> socket.socket:
    """Connect to a peer, to ask.

    Raises:
        OSError: it has gone, or has not answered before the deadline.
    """
    while True:
        try:
            return _call_once(address, key, rank, peer, deadline)
        except ConnectionRefusedError:
            raise  # nobody listens there any more
        except OSError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(_RETRY_S)  # it was dropped, as strangers are crowding in, or was too slow


def _call_once(address: tuple[str, int], key: bytes, rank: int, peer: int, deadline: float) -> socket.socket:
    connection = socket.create_connection(address, max(deadline - time.monotonic(), 1e-3))
    try:
        theirs, proof = bytearray(_NUMBER_BYTES), bytearray(_NUMBER_BYTES)
        receive(connection, memoryview(theirs), deadline)
        ours = secrets.token_bytes(_NUMBER_BYTES)
        connection.sendall(_HELLO.pack(rank, ours, _proof(key, b"asks", rank, peer, bytes(theirs), ours)))
        receive(connection, memoryview(proof), deadline)
        if not hmac.compare_digest(proof, _proof(key, b"answers", rank, peer, bytes(theirs), ours)):
            raise ConnectionAbortedError(f"what listens at {address} is not rank {peer}")
        _tune(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _tune(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # nothing may be said for hours


class _Unproven:
    """A connection that has not proven itself yet."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.number = secrets.token_bytes(_NUMBER_BYTES)
        self.said = b""
        self.since = time.monotonic()
        connection.setblocking(False)
        connection.send(self.number)


class _Meeting:
    """Takes the calls of the other ranks, in a thread of its own, until all have come.

    Attributes:
        found: connections to answer on, by rank.
        thread: ends when all have come, or when stopped.
    """

    def __init__(self, listener: socket.socket, key: bytes, rank: int, world: int) -> None:
        self.found: dict[int, socket.socket] = {}
        self._listener, self._key, self._rank, self._world = listener, key, rank, world
        self._unproven: dict[int, _Unproven] = {}
        self._stopped = False
        self._poll = select.poll()
        listener.setblocking(False)
        self._poll.register(listener, select.POLLIN)
        self.thread = threading.Thread(target=self._run, name="shardwise-meeting", daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """Take no more calls."""
        self._stopped = True
        self.thread.join()

    def _run(self) -> None:
        while len(self.found) < self._world - 1 and not self._stopped:
            for descriptor, _ in self._poll.poll(_STEP_S * 1e3):
                if descriptor == self._listener.fileno():
                    self._accept()
                elif descriptor in self._unproven:
                    self._hear(self._unproven[descriptor])
            for unproven in list(self._unproven.values()):
                if time.monotonic() - unproven.since > _UNPROVEN_S:
                    self._drop(unproven)
        for unproven in list(self._unproven.values()):
            self._drop(unproven)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it has gone again, or all descriptors of this process are in use
            connection, _ = self._listener.accept()
            try:
                unproven = _Unproven(connection)
            except OSError:
                connection.close()
                return
            if len(self._unproven) >= _MOST_UNPROVEN:
                self._drop(next(iter(self._unproven.values())))
            self._unproven[connection.fileno()] = unproven
            self._poll.register(connection, select.POLLIN)

    def _hear(self, unproven: _Unproven) -> None:
        try:
            said = unproven.connection.recv(_HELLO.size - len(unproven.said))
        except BlockingIOError:
            return
        except OSError:
            said = b""
        unproven.said += said
        if not said:
            self._drop(unproven)
        elif len(unproven.said) == _HELLO.size:
            self._judge(unproven)

    def _judge(self, unproven: _Unproven) -> None:
        peer, theirs, proof = _HELLO.unpack(unproven.said)
        known = peer < self._world and peer != self._rank and peer not in self.found
        if not known or not hmac.compare_digest(
            proof, _proof(self._key, b"asks", peer, self._rank, unproven.number, theirs)
        ):
            self._drop(unproven)
            return
        connection = unproven.connection
        try:
            _tune(connection)
            connection.send(_proof(self._key, b"answers", peer, self._rank, unproven.number, theirs))
        except OSError:
            self._drop(unproven)  # it will try again
            return
        self._forget(unproven)
        self.found[peer] = connection

    def _forget(self, unproven: _Unproven) -> None:
        descriptor = unproven.connection.fileno()
        self._poll.unregister(descriptor)
        del self._unproven[descriptor]

    def _drop(self, unproven: _Unproven) -> None:
        self._forget(unproven)
        unproven.connection.close()
