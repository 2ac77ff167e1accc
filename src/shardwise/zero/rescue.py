"""Rescue: a released unit's values, fetched from the peers outside the order of collectives.

Only needed when a rank's data makes it use a unit once more than ever before in a pass (a shared layer met for the first time, a
router that picks a layer twice). The peers' main threads are elsewhere and cannot take part in a collective, so each rank
has a small thread that answers requests with its shard over a key-value store. Shards do not change while any rank is inside
a pass, because no rank can step before all have finished their backward pass.

It is slow (host memory and one TCP store) and rare: the unit is kept longer in later passes.
"""

from __future__ import annotations

import datetime
import threading
from collections.abc import Sequence

import torch
import torch.distributed as dist

from shardwise.comm.communicator import Communicator
from shardwise.zero.unit import Unit

_PATIENCE = datetime.timedelta(days=365)


class Rescue:
    """Serves this rank's shards to peers and fetches theirs.

    Args:
        comm: the group; its rank 0 hosts the store, on loopback unless the job spans machines.
        units: the sharded units.
        host: address under which rank 0 is reached.
    """

    def __init__(self, comm: Communicator, units: Sequence[Unit], host: str) -> None:
        self.comm = comm
        self._units = {unit.index: unit for unit in units}
        if comm.rank == 0:
            server = dist.TCPStore(host, 0, None, True, wait_for_workers=False)
            self._server: dist.TCPStore | None = server
            port = server.port
        else:
            self._server = None
            port = 0
        address = comm.share_object([host, port], "rescue.address")
        assert isinstance(address, list)
        self._address: tuple[str, int] = (address[0], address[1])
        self._client = self._connect()
        self._listener = self._connect()
        self._thread = threading.Thread(target=self._serve, name="shardwise-rescue", daemon=True)
        self._thread.start()

    def _connect(self) -> dist.TCPStore:
        host, port = self._address
        return dist.TCPStore(host, port, None, False, timeout=_PATIENCE)

    def _serve(self) -> None:
        request = 0
        while True:
            try:
                rank, index = (int(part) for part in self._listener.get(f"request/{request}").decode().split())
            except (dist.DistError, RuntimeError):
                return  # the store has gone: the job is over
            if rank != self.comm.rank:
                for place, section in enumerate(self._units[index].sections if index >= 0 else ()):
                    self._listener.set(f"answer/{request}/{place}/{self.comm.rank}", _to_bytes(section.shard))
            elif index < 0:
                return
            request += 1

    def fetch(self, unit: Unit) -> None:
        """Fill the whole values of a unit (its memory is allocated) from all shards."""
        request = self._client.add("requests", 1) - 1
        self._client.set(f"request/{request}", f"{self.comm.rank} {unit.index}")
        for place, section in enumerate(unit.sections):
            for rank in range(self.comm.world):
                key = f"answer/{request}/{place}/{rank}"
                target = section.wire_view[slice(*section.layout.range_of(rank))]
                if rank == self.comm.rank:
                    target.copy_(section.shard)
                else:
                    _from_bytes(target, self._client.get(key))
                    self._client.delete_key(key)

    def close(self) -> None:
        """Stop serving."""
        request = self._client.add("requests", 1) - 1
        self._client.set(f"request/{request}", f"{self.comm.rank} -1")
        self._thread.join()
        # Rank 0 hosts the store; it must outlive the other ranks' threads.
        self.comm.barrier("rescue.close")


def _to_bytes(shard: torch.Tensor) -> bytes:
    return shard.detach().cpu().view(torch.uint8).numpy().tobytes()


def _from_bytes(target: torch.Tensor, data: bytes) -> None:
    if data:
        target.copy_(torch.frombuffer(bytearray(data), dtype=target.dtype))


