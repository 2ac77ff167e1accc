"""The side channel: what ranks tell each other outside the order of collectives, when their data makes them differ.

Two messages exist. Both are rare, and neither needs the peer's main thread, which is busy or blocked elsewhere: each
rank has a small thread that listens on a key-value store.

*fetch*: a rank needs a released unit once more than ever before in a pass (a shared layer met for the first time, a
router that picks a layer twice). The peers' threads answer with their shards, which do not change while any rank is
inside a pass, because no rank can step before all have finished their backward pass.

*want*: a rank waits for a gather while reductions that come earlier in the agreed order are still to be launched here.
A peer that waits for such a reduction would never launch the gather: each would wait for the other. The message lets
its thread launch the gather on its behalf.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import json
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.communicator import Communicator
from shardwise.zero.unit import Unit

_PATIENCE = datetime.timedelta(days=365)

_LEAVING_S = 10.0
"""When the program ends, rank 0 keeps the store for this long for ranks that end a little later."""

_open: weakref.WeakSet[SideChannel] = weakref.WeakSet()


class SideChannel:
    """Serves this rank's shards and wishes of others; see the module docstring.

    Args:
        comm: the group; its rank 0 hosts the store.
        units: the sharded units.
        host: address under which rank 0 is reached (loopback unless the job spans machines).
    """

    def __init__(self, comm: Communicator, units: Sequence[Unit], host: str) -> None:
        self.comm = comm
        self.on_want: Callable[[int, int], None] = lambda number, place: None
        self._units = {unit.index: unit for unit in units}
        # Rank 0 keeps the server alive by holding its store.
        self._server = dist.TCPStore(host, 0, None, True, wait_for_workers=False) if comm.rank == 0 else None
        address = comm.share_object([host, self._server.port if self._server else 0], "side_channel.address")
        assert isinstance(address, list)
        self._address: tuple[str, int] = (address[0], address[1])
        self._client = self._connect()
        self._listener = self._connect()
        self._thread = threading.Thread(target=self._serve, name="shardwise-side-channel", daemon=True)
        self._thread.start()
        _open.add(self)
        atexit.unregister(_leave_all)
        atexit.register(_leave_all)

    def _connect(self) -> dist.TCPStore:
        host, port = self._address
        return dist.TCPStore(host, port, None, False, timeout=_PATIENCE)

    def _post(self, message: dict[str, Any]) -> int:
        number = self._client.add("messages", 1) - 1
        self._client.set(f"message/{number}", json.dumps(message | {"rank": self.comm.rank}))
        return number

    def _serve(self) -> None:
        device = next((section.device for unit in self._units.values() for section in unit.sections), None)
        if device is not None and device.type == "cuda":
            torch.cuda.set_device(device)  # the current device is a thread's own
        number = 0
        while True:
            try:
                message = json.loads(self._listener.get(f"message/{number}"))
                mine = message["rank"] == self.comm.rank
                if message["kind"] == "stop" and mine:
                    return
                if message["kind"] == "fetch" and not mine:
                    for place, section in enumerate(self._units[message["unit"]].sections):
                        self._listener.set(f"shard/{number}/{place}/{self.comm.rank}", _to_bytes(section.shard))
                if message["kind"] == "want" and not mine:
                    self.on_want(message["pass"], message["place"])
            except (dist.DistError, RuntimeError):
                return  # the store has gone: the job is over
            number += 1

    def fetch(self, unit: Unit) -> None:
        """Fill the whole values of a unit (its memory is allocated) from all shards."""
        number = self._post({"kind": "fetch", "unit": unit.index})
        for place, section in enumerate(unit.sections):
            for rank in range(self.comm.world):
                target = section.wire_view[slice(*section.layout.range_of(rank))]
                if rank == self.comm.rank:
                    target.copy_(section.shard)
                else:
                    key = f"shard/{number}/{place}/{rank}"
                    _from_bytes(target, self._client.get(key))
                    self._client.delete_key(key)

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
    # After an exception that nobody has caught the peers must see this process gone, and it does not linger.
    if getattr(sys, "last_value", None) is None:
        for channel in list(_open):
            channel.leave()


def _to_bytes(shard: torch.Tensor) -> Any:
    return shard.detach().cpu().view(torch.uint8).numpy().tobytes()


def _from_bytes(target: torch.Tensor, data: bytes) -> None:
    if data:
        target.copy_(torch.frombuffer(bytearray(data), dtype=target.dtype))
