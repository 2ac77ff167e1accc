"""Connections between the machines of a job, tried before the start, and measured by `shardwise doctor`."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from shardwise.launch import wire

LIMIT_S = 4.0
_MEASURED_S = 0.2
_TRIPS = 10
_BLOCK = 1 << 18


class EchoServer:
    """Answers other machines of the job at an address of this machine, on any free port, until it is closed."""

    def __init__(self, address: str, secret: bytes) -> None:
        self._listener = wire.Listener([address], secret)
        self.port = self._listener.port(address)
        self._closed = threading.Event()
        threading.Thread(target=self._serve, name="echo", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        if not self._closed.is_set():
            self._closed.set()
            self._listener.close()

    def _serve(self) -> None:
        while not self._closed.is_set():
            with contextlib.suppress(queue.Empty):
                connection, _ = self._listener.arrived.get(timeout=0.5)
                threading.Thread(target=_answer, args=(connection,), name="echo", daemon=True).start()


def _answer(connection: Connection) -> None:
    """Answer each short message, and none of the long ones."""
    with contextlib.suppress(EOFError, OSError), connection:
        while True:
            message = connection.recv_bytes(_BLOCK)
            if len(message) < _BLOCK:
                connection.send_bytes(message)


def reach(address: str, port: int, secret: bytes, measure: bool) -> dict[str, Any]:
    """Connect to another machine; return the error (empty: none), and if `measure` the bytes per second and the seconds
    of a round trip.
    """
    try:
        made = socket.create_connection((address, port), timeout=LIMIT_S)
    except OSError as error:
        return {"error": (error.strerror or str(error)).lower()}
    connection = wire.authenticated(made, secret)
    if connection is None:
        return {"error": "the process there does not know the secret of this job"}
    found: dict[str, Any] = {"error": ""}
    try:
        with connection:
            if measure:
                found["trip"] = min(_round_trip(connection) for _ in range(_TRIPS))
                found["rate"] = _rate(connection)
    except (EOFError, OSError) as error:
        found["error"] = f"the connection was lost ({error})"
    return found


def _round_trip(connection: Connection) -> float:
    began = time.perf_counter()
    connection.send_bytes(b"1")
    connection.recv_bytes()
    return time.perf_counter() - began


def _rate(connection: Connection) -> float:
    block, sent, began = bytes(_BLOCK), 0, time.perf_counter()
    while time.perf_counter() - began < _MEASURED_S:
        connection.send_bytes(block)
        sent += _BLOCK
    _round_trip(connection)  # the other machine has read all
    return sent / (time.perf_counter() - began)
