"""Sources of an all-gather: shards, secondary shards, or quantized weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from typing_extensions import override

from shardwise.comm.collective_queue import Launch
from shardwise.comm.communicator import Communicator
from shardwise.comm.domain import Domain
from shardwise.comm.native import PendingCollective
from shardwise.zero.units.flat_param import FlatParamStorage


class GatherSource(ABC):
    """Source of the all-gather of a unit.

    `fills`: the all-gather writes into the unsharded buffers, which have memory before its launch. Else they get
    memory when the all-gather has ended, and `finish` writes into them.
    """

    fills = True

    @abstractmethod
    def launches(self, label: str, kind: str = "gather") -> Sequence[Launch]:
        """Return the collectives to be launched in turn (`CollectiveQueue.start`)."""

    def finish(self) -> None:  # noqa: B027, because most sources have nothing to do
        """Complete the unsharded buffers when the all-gather has ended."""

    def round(self) -> None:  # noqa: B027, because most sources are exact
        """Round exact unsharded values as an all-gather from this source does."""


class _OffloadedShards:
    """Copies offloaded shards into the unsharded buffers, which no peer fills."""

    scratch: Sequence[torch.Tensor] = ()
    completed = False  # until `wait`

    def __init__(self, sections: Sequence[FlatParamStorage]) -> None:
        self._sections = sections
        for section in sections:
            section.begin_to_bring_shard()

    def wait(self) -> None:
        for section in self._sections:
            section.bring_shard()


class ShardSource(GatherSource):
    """The shards of all ranks of a domain."""

    def __init__(self, sections: Sequence[FlatParamStorage], domain: Domain) -> None:
        self._sections = sections
        self._domain = domain
        self._level = max((section.levels.parameters for section in sections), default=0)
        self._away = any(section.tiered_shard.away for section in sections)

    @override
    def launches(self, label: str, kind: str = "gather") -> Sequence[Launch]:
        sections, level = self._sections, self._level
        if not self._away:
            return self._domain.gathering([(s.full, s.shard, level) for s in sections], 0, label, kind)
        # Offloaded shards are copied to their ranges of the unsharded buffers, and gathered from there.
        moves = [(s.full, s.full[s.shard_range], level) for s in sections]
        launches = self._domain.gathering(moves, 0, label, kind)
        if not launches:
            return [lambda: _OffloadedShards(sections)]

        def begin() -> PendingCollective:
            for section in sections:
                section.bring_shard()
            return launches[0]()

        return [begin, *launches[1:]]


class SecondShardSource(GatherSource):
    """The secondary shards of the few ranks of `comm` (ZeRO++, hpZ)."""

    def __init__(self, sections: Sequence[FlatParamStorage], comm: Communicator) -> None:
        self._sections = sections
        self._comm = comm
        self.world = comm.world

    @override
    def launches(self, label: str, kind: str = "gather") -> Sequence[Launch]:
        seconds = [(s, s.second) for s in self._sections if s.second is not None]
        return [
            lambda: self._comm.all_gather([(s.full, s.tiered_second.read(own)) for s, own in seconds], label, kind=kind)
        ]
