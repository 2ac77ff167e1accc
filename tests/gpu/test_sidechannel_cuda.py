"""The side channel on a CUDA device: what a stream of the pass waits for must not hold up an answer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwise.zero.passes.sidechannel import CHUNK, SideChannel
from tests.comm.test_p2p import Group
from tests.gpu.standin import rehearsing


class OneUnit:
    """Stands for a unit with one section, sharded over two ranks."""

    index, name = 0, "unit"

    def __init__(self, rank: int, shard: int) -> None:
        self.sections = [self]
        self.full = torch.zeros(2 * shard, device="cuda")
        self.shard = torch.arange(shard, dtype=torch.float32, device="cuda") + rank * shard
        self.layout: Any = self
        self.domain: Any = self
        self.ranks: Any = self
        self.members = [0, 1]
        self.level = 1
        self._rank, self._shard = rank, shard

    @property
    def shard_loans(self) -> Any:
        """See `shardwise.memory.places.Loans`: the shard lies on the device."""
        return self

    def read(self, shard: torch.Tensor) -> torch.Tensor:
        """See `shardwise.memory.places.Loans`."""
        return shard

    def bring_shard(self) -> None:
        """See `shardwise.zero.units.flat_param.FlatParamStorage`."""
        self.full[self.shard_range] = self.shard

    def range_of(self, place: int, level: int | None = None) -> tuple[int, int]:
        """See `shardwise.zero.units.layout.FlatParam`."""
        return place * self._shard, (place + 1) * self._shard

    @property
    def shard_range(self) -> slice:
        """See `shardwise.zero.units.flat_param.FlatParamStorage`."""
        return slice(*self.range_of(self._rank))

    def holders(self, level: int) -> list[tuple[int, int]]:
        """See `shardwise.comm.domain.Domain`."""
        return [(self._rank, self._rank), (1 - self._rank, 1 - self._rank)]


def test_a_shard_is_fetched_while_the_peers_stream_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    units = [OneUnit(rank, 3 * CHUNK // 4 + 1) for rank in range(2)]  # three chunks and a bit
    group = Group(2, device=torch.device("cuda", torch.cuda.current_device()))
    # Both ranks are in this process, which has no default group, and connect when the first one asks.
    monkeypatch.setattr("shardwise.comm.p2p.default_store", lambda: group.store)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()

    def begin(comm: Any) -> SideChannel:
        with torch.cuda.stream(streams[comm.rank]):
            channel = SideChannel(comm, [units[comm.rank]])  # type: ignore[list-item]
            channel.raise_helper_error()
            return channel

    asking, answering = group.run(begin)
    with torch.cuda.stream(streams[1]):
        torch.cuda._sleep(1 << 34)  # as behind a gather that the rank which asks has still to launch
        answering.raise_helper_error()
    with torch.cuda.stream(streams[0]):
        asking.fetch(units[0])
    streams[0].synchronize()
    assert rehearsing() or not streams[1].query()
    assert torch.equal(units[0].full, torch.arange(units[0].full.numel(), dtype=torch.float32, device="cuda"))
    streams[1].synchronize()
    for channel in (asking, answering):
        channel.close()
