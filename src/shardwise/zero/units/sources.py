"""Sources of an all-gather: shards, secondary shards, or quantized weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from typing_extensions import override

from shardwise.comm.collective_queue import Launch
from shardwise.comm.communicator import Communicator
from shardwise.comm.domain import Domain
from shardwise.comm.native import PendingCollective
from shardwise.zero.units.flat_param import FlatParamStorage


class GatherSource(Protocol):
    """What a unit's whole values are gathered from.

    Attributes:
        fills: the gather writes into the whole buffers, which have memory before it is launched; else `finish` does,
            and they need none until then.
    """

    fills: bool

    def launches(self, label: str, kind: str = "gather") -> Sequence[Launch]:
        """Return what is to be launched in turn (see `shardwise.comm.collective_queue.CollectiveQueue.start`)."""

    def finish(self) -> None:
        """Complete the whole buffers when the gather has ended."""


class Codes(GatherSource, Protocol):
    """A source that loses digits (`shardwise.zero.units.quantized_weights.UnitCodes`)."""

    def round(self) -> None:
        """Make exact whole values what they would be had they been gathered so."""


class _Coming:
    """Shards that come from where they live into the whole buffers, which nobody else fills.

    Args:
        sections: theirs.
    """

    scratch: Sequence[torch.Tensor] = ()

    def __init__(self, sections: Sequence[FlatParamStorage]) -> None:
        self._sections = sections
        for section in sections:
            section.begin_to_bring_shard()

    def wait(self) -> None:
        """Wait until they are there."""
        for section in self._sections:
            section.bring_shard()


class ShardSource(GatherSource):
    """The shards themselves, of all ranks that have them.

    Args:
        sections: the unit's.
        domain: the ranks that have it.
    """

    fills = True

    def __init__(self, sections: Sequence[FlatParamStorage], domain: Domain) -> None:
        self._sections = sections
        self._domain = domain
        self._level = max((section.levels.parameters for section in sections), default=0)
        self._away = any(section.shard_loans.away for section in sections)

    @override
    def launches(self, label: str, kind: str = "gather") -> Sequence[Launch]:
        sections, level = self._sections, self._level
        if not self._away:
            return self._domain.gathering([(s.full, s.shard, level) for s in sections], 0, label, kind)
        # What lives elsewhere is brought to where it is to be in the whole buffer, and gathered from there.
        moves = [(s.full, s.full[s.shard_range], level) for s in sections]
        launches = self._domain.gathering(moves, 0, label, kind)
        if not launches:
            return [lambda: _Coming(sections)]

        def begin() -> PendingCollective:
            for section in sections:
                section.bring_shard()
            return launches[0]()

        return [begin, *launches[1:]]

    def finish(self) -> None:
        """Nothing is left to be done."""


class SecondShardSource(GatherSource):
    """The second shards, of a few ranks (ZeRO++, hpZ).

    Args:
        sections: the unit's.
        comm: the ranks over which they are sharded.
    """

    fills = True

    def __init__(self, sections: Sequence[FlatParamStorage], comm: Communicator) -> None:
        self._sections = sections
        self._comm = comm
        self.world = comm.world

    @override
    def launches(self, label: str, kind: str = "gather") -> Sequence[Launch]:
        seconds = [(s, s.second) for s in self._sections if s.second is not None]
        return [
            lambda: self._comm.all_gather([(s.full, s.second_loans.read(own)) for s, own in seconds], label, kind=kind)
        ]

    def finish(self) -> None:
        """Nothing is left to be done."""
