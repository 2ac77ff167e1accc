"""Authenticated point-to-point connections between the ranks of a group, outside of its process groups.

The first request of a rank to another one connects them. Each rank listens on one port, of the loopback interface if
all ranks are on one machine, and writes its address into the store. Both sides prove knowledge of a random key, which
rank 0 shares in a collective. Each side sends a random number, and receives it under the key (HMAC-SHA256) with both
ranks and the direction: a proof fits one connection only.

Invariants of the open port: data before a proof has a fixed size; a connection without a proof blocks no other one, is
dropped after a few seconds, and their number is limited; a dropped rank may try again; one connection per rank is
accepted. The proof covers a connection, not its bytes: between machines these are as safe as the process group's.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import ipaddress
import json
import resource
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from shardwise.comm.communicator import Communicator
from shardwise.comm.environment import LOOPBACK
from shardwise.comm.rendezvous import machine, own_address
from shardwise.compat import default_store
from shardwise.errors import PeerLostError

_NUMBER_BYTES = 32
_HELLO = struct.Struct(f"<I{_NUMBER_BYTES}s{_NUMBER_BYTES}s")  # rank, random number and proof of a connecting rank
_NAME_BYTES = 8
_MOST_UNPROVEN = 64
_UNPROVEN_S = 5.0  # seconds in which a connection must prove itself
_RETRY_S = 0.05
STEP_S = 0.2


@dataclass
class _Unproven:
    number: bytes = field(default_factory=functools.partial(secrets.token_bytes, _NUMBER_BYTES))
    received: bytes = b""
    since: float = field(default_factory=time.monotonic)


class P2PConnections:
    """Connections of this rank to others of a group (all ranks create it together, in one or two small collectives).

    `selector` waits for incoming data; the data of each key is a function to be called then. `found` is called with the
    rank and the connection of a rank that has connected.
    """

    def __init__(
        self,
        comm: Communicator,
        selector: selectors.BaseSelector,
        found: Callable[[int, socket.socket], None],
    ) -> None:
        self._comm, self._selector, self._found = comm, selector, found
        self._asking: dict[int, socket.socket] = {}
        self._known: set[int] = set()
        self._unproven: dict[socket.socket, _Unproven] = {}
        _allow_files(2 * comm.world)
        one_machine = len(set(comm.fingerprints(machine(), "side_channel.machines"))) == 1
        name, secret = secrets.token_hex(_NAME_BYTES), secrets.token_hex(_NUMBER_BYTES)
        shared: Any = comm.share_object([name, secret], "side_channel.key")
        self.name, self._key = f"shardwise/links/{shared[0]}", bytes.fromhex(shared[1])
        host = LOOPBACK if one_machine else own_address()
        self._listener = _listen(host)
        self._listener.setblocking(False)
        selector.register(self._listener, selectors.EVENT_READ, self._accept)
        if comm.world > 1:
            self._store().set(f"{self.name}/{comm.rank}", json.dumps([host, self._listener.getsockname()[1]]))

    def to(self, peer: int, deadline: float) -> socket.socket:
        """Return the connection for requests to a peer, created at first use (blocking, until `deadline`).

        Raises:
            OSError: the peer has gone, or has not answered before `time.monotonic()` reaches the deadline.
        """
        if peer not in self._asking:
            address = f"{self.name}/{peer}"
            while not self._store().check([address]):
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"rank {peer} does not listen")
                time.sleep(_RETRY_S)
            host, port = json.loads(self._store().get(address))
            self._asking[peer] = _call((host, port), self._key, self._comm.rank, peer, deadline)
        return self._asking[peer]

    def drop(self, peer: int) -> None:
        """Close the connection for requests to a peer, because later data on it answers no request."""
        if peer in self._asking:
            self._asking[peer].close()

    def leave(self) -> None:
        """Stop listening; the owners of connections keep them."""
        for connection in list(self._unproven):
            self._drop(connection)
        with contextlib.suppress(KeyError, ValueError):  # the selector is closed
            self._selector.unregister(self._listener)
        self._listener.close()

    def patience(self) -> float | None:
        """Return the seconds until `expire` is due; None: after incoming data."""
        return STEP_S if self._unproven else None

    def expire(self) -> None:
        """Drop connections that have not proven themselves in time."""
        for connection, unproven in list(self._unproven.items()):
            if time.monotonic() - unproven.since > _UNPROVEN_S:
                self._drop(connection)

    def close(self) -> None:
        """Close all connections."""
        self.leave()
        while self._asking:
            self._asking.popitem()[1].close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the caller has gone, or all descriptors of this process are in use
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            if len(self._unproven) >= _MOST_UNPROVEN:
                self._drop(next(iter(self._unproven)))
            unproven = self._unproven[connection] = _Unproven()
            self._selector.register(connection, selectors.EVENT_READ, functools.partial(self._hear, connection))
            try:
                connection.send(unproven.number)
            except OSError:
                self._drop(connection)

    def _hear(self, connection: socket.socket) -> None:
        unproven = self._unproven.get(connection)
        if unproven is None:
            return  # dropped while this call was due
        try:
            data = connection.recv(_HELLO.size - len(unproven.received))
            unproven.received += data
            if len(unproven.received) == _HELLO.size:
                self._judge(connection, unproven)
            elif not data:
                self._drop(connection)
        except BlockingIOError:
            return
        except OSError:
            self._drop(connection)  # the peer will try again

    def _judge(self, connection: socket.socket, unproven: _Unproven) -> None:
        peer, theirs, proof = _HELLO.unpack(unproven.received)
        own = self._comm.rank
        known = peer < self._comm.world and peer != own and peer not in self._known
        if not known or not hmac.compare_digest(proof, _proof(self._key, b"asks", peer, own, unproven.number, theirs)):
            self._drop(connection)
            return
        _tune(connection)
        connection.send(_proof(self._key, b"answers", peer, own, unproven.number, theirs))
        self._selector.unregister(connection)
        del self._unproven[connection]
        self._known.add(peer)
        self._found(peer, connection)

    def _drop(self, connection: socket.socket) -> None:
        del self._unproven[connection]
        self._selector.unregister(connection)
        connection.close()

    def _store(self) -> dist.Store:
        store = default_store()
        assert store is not None  # the group has met through it
        return store


@contextlib.contextmanager
def reaching(comm: Communicator, peer: int, what: str, begin: float) -> Iterator[None]:
    """Convert an error of a connection in the block to one that names the rank and the request."""
    try:
        yield
    except OSError as error:
        lost = PeerLostError(f"rank {peer} has not answered rank {comm.rank}: {what}")
        lost.peer, lost.timed_out = peer, isinstance(error, TimeoutError)
        lost.__cause__ = error
        raise comm.explain(lost, what, time.monotonic() - begin) from error


def receive(connection: socket.socket, into: memoryview, deadline: float) -> None:
    """Fill `into` from a blocking socket; raise TimeoutError at the deadline, another OSError if it is closed."""
    while into.nbytes:
        connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        count = connection.recv_into(into)
        if not count:
            raise ConnectionResetError("the connection has been closed at the other end")
        into = into[count:]


def _allow_files(more: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and more > soft // 2:  # leaves half to other users
        wanted = soft + more if hard == resource.RLIM_INFINITY else min(soft + more, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _listen(host: str) -> socket.socket:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        host = ""  # a name may have another address on another machine
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=2048)


def _proof(key: bytes, side: bytes, asking: int, answering: int, theirs: bytes, ours: bytes) -> bytes:
    return hmac.digest(key, side + struct.pack("<II", asking, answering) + theirs + ours, "sha256")


def _call(address: tuple[str, int], key: bytes, rank: int, peer: int, deadline: float) -> socket.socket:
    while True:
        with contextlib.ExitStack() as closing:
            try:
                connection = socket.create_connection(address, max(deadline - time.monotonic(), 1e-3))
                closing.callback(connection.close)
                theirs, proof = bytearray(_NUMBER_BYTES), bytearray(_NUMBER_BYTES)
                receive(connection, memoryview(theirs), deadline)
                ours = secrets.token_bytes(_NUMBER_BYTES)
                connection.sendall(_HELLO.pack(rank, ours, _proof(key, b"asks", rank, peer, bytes(theirs), ours)))
                receive(connection, memoryview(proof), deadline)
                if not hmac.compare_digest(proof, _proof(key, b"answers", rank, peer, bytes(theirs), ours)):
                    raise ConnectionAbortedError(f"what listens at {address} is not rank {peer}")
                _tune(connection)
                closing.pop_all()
                return connection
            except ConnectionRefusedError:
                raise  # the peer listens no more
            except OSError:
                if time.monotonic() >= deadline:
                    raise
        time.sleep(_RETRY_S)  # dropped among many unproven connections, or too slow


def _tune(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # nothing may be sent for hours
