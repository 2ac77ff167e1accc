"""Connections between the launcher and the agents of other machines.

Messages are JSON objects over TCP. Both ends prove that they know the job's secret (HMAC, by the standard library's
multiprocessing.connection), and listen only on the addresses of the job. Both send a beat every `BEAT_S`; an end that
hears nothing for a time counts as lost. Nothing that arrives can run code.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from shardwise.errors import LaunchError

BEAT_S = 1.0
LOST_S = 6.0
"""Seconds without a message after which the other end counts as lost: a machine that is down sends no error."""

_HANDSHAKE_S = 10.0
_LONGEST = 16 << 20
_END = "connection closed"

Message = dict[str, Any]


class Channel:
    """One authenticated connection. `on_message` is called by a thread for each message, `on_end` once with the reason
    when the other end is lost. Not for signal handlers: they may interrupt a message that is being sent.
    """

    def __init__(self, connection: Connection, on_message: Callable[[Message], None], on_end: Callable[[str], None]):
        self._connection = connection
        self.on_message, self._on_end = on_message, on_end
        self._sending = threading.Lock()
        self._closed = threading.Event()

    def begin(self) -> None:
        """Begin to read and to send beats."""
        for work in (self._read, self._beat):
            threading.Thread(target=work, name="control", daemon=True).start()

    def send(self, message: Message) -> None:
        """Send a message; if the other end is gone, nothing happens (`on_end` says so)."""
        with self._sending, contextlib.suppress(OSError, ValueError):
            self._connection.send_bytes(json.dumps(message).encode())

    def close(self) -> None:
        """Close the connection; `on_end` is not called any more."""
        self._closed.set()
        _shut_down(self._connection)
        with contextlib.suppress(OSError):
            self._connection.close()

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_S):
            self.send({})

    def _read(self) -> None:
        reason = _END
        try:
            while not self._closed.is_set():
                if not self._connection.poll(LOST_S):
                    reason = f"no message for {LOST_S:.0f} s"
                    break
                message = json.loads(self._connection.recv_bytes(_LONGEST))
                if message:
                    self.on_message(message)
        except (EOFError, OSError, ValueError):
            pass
        if not self._closed.is_set():
            self.close()
            self._on_end(reason)


class Listener:
    """Listens at some addresses of this machine, for ends that know `secret`. `arrived` receives connections.

    `port` 0 is any free port.
    """

    def __init__(self, addresses: Sequence[str], secret: bytes, port: int = 0) -> None:
        self.arrived: queue.SimpleQueue[tuple[Connection, str]] = queue.SimpleQueue()
        self._secret = secret
        self._sockets = {address: _listen(address, port) for address in dict.fromkeys(addresses)}
        for listening in self._sockets.values():
            threading.Thread(target=self._accept, args=(listening,), name="listener", daemon=True).start()

    def port(self, address: str) -> int:
        """Return the port at an address."""
        return int(self._sockets[address].getsockname()[1])

    def close(self) -> None:
        """Stop listening."""
        for listening in self._sockets.values():
            with contextlib.suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)
            listening.close()

    def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                accepted, peer = listening.accept()
            except OSError:
                return
            threading.Thread(target=self._admit, args=(accepted, peer[0]), daemon=True).start()

    def _admit(self, accepted: socket.socket, peer: str) -> None:
        connection = _connection(accepted)
        with contextlib.suppress(AuthenticationError):
            if _handshake(connection, self._secret, first=True):
                self.arrived.put((connection, peer))


def connect(address: str, port: int, secret: bytes, limit: float) -> tuple[Connection, str]:
    """Connect to a listener; return the connection, and the address of this machine that the other end sees.

    Raises LaunchError if nothing answers within `limit` seconds, or the other end has another secret.
    """
    deadline = time.monotonic() + limit
    while True:
        try:
            made = socket.create_connection((address, port), timeout=5.0)
            own, connection = str(made.getsockname()[0]), _connection(made)
            if _handshake(connection, secret, first=False):
                return connection, own
            reason = "the process there does not answer"  # perhaps not yet: many machines join it
        except AuthenticationError as error:
            raise LaunchError(f"{address}:{port}: the process there does not know the secret of this job.") from error
        except OSError as error:
            reason = str(error.strerror or error)
        if time.monotonic() > deadline:
            raise LaunchError(
                f"this machine ({socket.gethostname()}) cannot reach the launcher at {address}:{port}: {reason}. Open "
                "that way for the machines of the job, or start the job on a machine that they reach."
            )
        time.sleep(0.2)


def authenticated(made: socket.socket, secret: bytes) -> Connection | None:
    """Return the connection to a listener, or None if the process there does not know the secret or does not answer."""
    connection = _connection(made)
    with contextlib.suppress(AuthenticationError):
        if _handshake(connection, secret, first=False):
            return connection
    return None


def near_address(host: str) -> str:
    """Return the address of this machine on the route to a host. Raises LaunchError if the name is not known."""
    try:
        family, _, _, _, far = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    except OSError as error:
        raise LaunchError(
            f"{host}: this machine knows no address of that name ({error.strerror}). Write its address into the "
            "hostfile, or a line into /etc/hosts."
        ) from error
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(far)  # sends nothing
            return str(probe.getsockname()[0])
        except OSError as error:
            raise LaunchError(f"{host}: there is no route to it ({error.strerror}).") from error


def _listen(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=2048)
    except OSError as error:
        where = f"{address}:{port}" if port else address
        raise LaunchError(f"Cannot listen on {where}: {error.strerror}.") from error


def _connection(made: socket.socket) -> Connection:
    made.settimeout(None)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(made.detach())


def _shut_down(connection: Connection) -> None:
    """End reads and writes in all threads. Because a read does not end when another thread closes the connection."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as shared:
        shared.shutdown(socket.SHUT_RDWR)


def _handshake(connection: Connection, secret: bytes, *, first: bool) -> bool:
    """Prove and check the secret, or close the connection and return False: the other end is gone, or takes too long.

    Raises AuthenticationError if the other end has another secret, or none.
    """
    late = threading.Timer(_HANDSHAKE_S, _shut_down, [connection])
    late.start()
    try:
        for step in (deliver_challenge, answer_challenge) if first else (answer_challenge, deliver_challenge):
            step(connection, secret)
        return True
    except (AuthenticationError, AssertionError, ValueError) as error:
        with contextlib.suppress(OSError):
            connection.close()
        raise AuthenticationError("another secret") from error
    except (EOFError, OSError):
        with contextlib.suppress(OSError):
            connection.close()
        return False
    finally:
        late.cancel()
