"""The side channel: what ranks tell each other outside the order of collectives, when their data makes them differ.

Two messages exist. Both are rare, and neither needs the peer's main thread, which is busy or blocked elsewhere: each
rank has a small thread that listens on a key-value store, which the group's rank 0 serves.

*fetch*: a rank needs a released unit once more than ever before in a pass (a shared layer met for the first time, a
router that picks a layer twice). The peers' threads answer with their shards, which do not change while any rank is
inside a pass, because no rank can step before all have finished their backward pass.

*want*: a rank waits for a gather while reductions that come earlier in the agreed order are still to be launched here.
A peer that waits for such a reduction would never launch the gather: each would wait for the other. The message lets
its thread launch the gather on its behalf.

Numbered messages are read by every rank; the last one to read a message deletes it. What goes wrong in the thread is
raised by the pass that it helps.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.communicator import Communicator
from shardwise.comm.environment import LOOPBACK
from shardwise.comm.rendezvous import machine, own_address, serve
from shardwise.comm.whereabouts import publish_end
from shardwise.errors import PeerLostError
from shardwise.zero.unit import Unit

_PATIENCE = timedelta(days=365)
"""The thread waits for ever for a message; it is ended by one."""

_LEAVING_S = 10.0
"""When the program ends, rank 0 keeps the store for this long for ranks that end a little later."""

_open: weakref.WeakSet[SideChannel] = weakref.WeakSet()


class SideChannel:
    """Serves this rank's shards and wishes of others; see the module docstring.

    Args:
        comm: the group; its rank 0 hosts the store.
        units: the sharded units.
    """

    def __init__(self, comm: Communicator, units: Sequence[Unit]) -> None:
        self.comm = comm
        self.on_want: Callable[[int, int], None] = lambda number, place: None
        self._units = {unit.index: unit for unit in units}
        self._error: Exception | None = None
        self._stream: torch.cuda.Stream | None = None
        self._note_stream()
        one_machine = len(set(comm.fingerprints(machine(), "side_channel.machines"))) == 1
        host = ""
        self._server: dist.TCPStore | None = None  # lives as long as this reference
        if comm.rank == 0:
            host = LOOPBACK if one_machine else own_address()
            self._server = serve(host, 0, comm.timeout)
        address = comm.share_object([host, self._server.port if self._server else 0], "side_channel.address")
        assert isinstance(address, list)
        self._address: tuple[str, int] = (address[0], address[1])
        self._client = self._connect()
        self._listener = self._connect()
        self._listener.set_timeout(_PATIENCE)
        self._thread = threading.Thread(target=self._serve, name="shardwise-side-channel", daemon=True)
        self._thread.start()
        _open.add(self)
        atexit.unregister(_leave_all)
        atexit.register(_leave_all)

    def _connect(self) -> dist.TCPStore:
        host, port = self._address
        return dist.TCPStore(host, port, None, False, timeout=self.comm.timeout)

    def _post(self, message: dict[str, Any]) -> int:
        number = self._client.add("messages", 1) - 1
        self._client.set(f"message/{number}", json.dumps(message | {"rank": self.comm.rank}))
        return number

    def _serve(self) -> None:
        if self.comm.device.type == "cuda":
            torch.cuda.set_device(self.comm.device)  # the current device is a thread's own
        number, going_on = 0, True
        while going_on:
            try:
                message = json.loads(self._listener.get(f"message/{number}"))
            except RuntimeError:
                return  # the store has gone: the job is over
            try:
                with self._on_stream():
                    going_on = self._answer(number, message)
            except Exception as error:
                self._error = self._error or error
            with contextlib.suppress(RuntimeError):
                self._forget(number)
            number += 1

    def _answer(self, number: int, message: dict[str, Any]) -> bool:
        """Do what a message asks for; return whether there is more to come for this rank."""
        mine = message["rank"] == self.comm.rank
        if message["kind"] == "fetch" and not mine:
            for place, section in enumerate(self._units[message["unit"]].sections):
                self._listener.set(f"shard/{number}/{place}/{self.comm.rank}", _to_bytes(section.shard))
        if message["kind"] == "want" and not mine:
            self.on_want(message["pass"], message["place"])
        return not (message["kind"] == "stop" and mine)

    def _forget(self, number: int) -> None:
        """Delete a message that all ranks have read."""
        if self._listener.add(f"read/{number}", 1) == self.comm.world:
            self._listener.delete_key(f"message/{number}")
            self._listener.delete_key(f"read/{number}")

    def _on_stream(self) -> AbstractContextManager[Any]:
        # A gather is launched behind what the pass has put on its stream, and its memory belongs to that stream.
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _note_stream(self) -> None:
        if self.comm.device.type == "cuda":
            self._stream = torch.cuda.current_stream(self.comm.device)

    def attend(self) -> None:
        """Note the stream of the calling thread, on which help is launched from now on.

        Raises:
            Exception: what has gone wrong in the thread that helps the peers.
        """
        self._note_stream()
        if self._error is not None:
            raise self._error

    def fetch(self, unit: Unit) -> None:
        """Fill the whole values of a unit (its memory is allocated) from all shards.

        Raises:
            PeerLostError: a peer has gone, or has not answered within the group's limit for a collective.
            DesyncError: the same, and it waits for this rank elsewhere.
        """
        number = self._post({"kind": "fetch", "unit": unit.index})
        begin = time.monotonic()
        for place, section in enumerate(unit.sections):
            for rank in range(self.comm.world):
                target = section.wire_view[slice(*section.layout.range_of(rank))]
                if rank == self.comm.rank:
                    target.copy_(section.shard)
                else:
                    _from_bytes(target, self._take(f"shard/{number}/{place}/{rank}", unit, rank, begin))

    def _take(self, key: str, unit: Unit, rank: int, begin: float) -> bytes:
        """Read and delete a shard; the limit counts from `begin`, for all shards of a fetch together."""
        left = self.comm.timeout.total_seconds() - (time.monotonic() - begin)
        try:
            self._client.wait([key], timedelta(seconds=max(left, 0.001)))
            data = self._client.get(key)
            self._client.delete_key(key)
        except RuntimeError as error:
            waited = time.monotonic() - begin
            lost = PeerLostError(f"rank {rank} has not sent its part of unit {unit.name!r}")
            lost.peer, lost.timed_out = rank, waited >= self.comm.timeout.total_seconds() - 0.005
            lost.__cause__ = error
            raise self.comm.explain(lost, f"fetch {unit.name!r}", waited) from error
        return bytes(data)

    def want(self, number: int, place: int) -> None:
        """Tell the peers that backward pass `number` waits for the gather at `place` of its order."""
        self._post({"kind": "want", "pass": number, "place": place})

    def close(self) -> None:
        """Stop listening (all ranks must call)."""
        _open.discard(self)
        self._post({"kind": "stop"})
        self._thread.join()
        # Rank 0 hosts the store; it must outlive the other ranks' threads.
        self.comm.barrier("side_channel.close")
        self._server = None

    def leave(self) -> None:
        """Stop listening because this process ends, whatever the others do."""
        # A thread that is still inside the store's client when the interpreter goes would take the process down.
        with contextlib.suppress(RuntimeError):  # the store has gone, and with it the thread
            self._post({"kind": "stop"})
            left = self._client.add("left", 1)
            deadline = time.monotonic() + _LEAVING_S
            while self._server is not None and left < self.comm.world and time.monotonic() < deadline:
                time.sleep(0.01)
                left = self._client.add("left", 0)
        self._thread.join(_LEAVING_S)


def _leave_all() -> None:
    # Leaving may take a while, in which peers may give up waiting for this rank.
    publish_end()
    # After an exception that nobody has caught the peers must see this process gone, and it does not linger.
    if getattr(sys, "last_value", None) is None:
        for channel in list(_open):
            channel.leave()


def _to_bytes(shard: torch.Tensor) -> Any:
    return shard.detach().cpu().view(torch.uint8).numpy().tobytes()


def _from_bytes(target: torch.Tensor, data: bytes) -> None:
    if data:
        target.copy_(torch.frombuffer(bytearray(data), dtype=target.dtype))
