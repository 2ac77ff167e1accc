"""Shards of peers, read outside the order of collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from typing_extensions import override

from shardwise.device.streams import Mark
from shardwise.zero.units.unit import Unit


class PeerShards(Protocol):
    """Reads shards of peers for a rank that needs a unit again; lets peers launch all-gathers that it waits for."""

    def fetch(self, unit: Unit) -> None:
        """Fill the unsharded values of a unit, whose memory is allocated, from the shards of all ranks."""

    def want(self, number: int, position: int) -> None:
        """Report to peers that backward pass `number` waits for the all-gather at a position of its order."""

    def on_want(self, handler: Callable[[int, int], None] | None) -> None:
        """Call a function for each report of a peer, on any thread, with the arguments of `want`."""

    def check_present(self) -> None:
        """Raise if a peer will not take part in another all-gather."""

    def raise_helper_error(self) -> None:
        """Raise an error of the thread that answers peers; record the calling thread's stream for all-gathers."""

    def shards_written(self, mark: Mark) -> None:
        """Record that shards have new values when the device reaches an event."""

    def end_together(self, where: str, phase: str, *, cut_short: bool) -> str:
        """Wait until all ranks call; return why the ranks cannot go on together ("" if they can)."""

    def close(self) -> None:
        """End the connections."""


class NoPeers(PeerShards):
    """Shards of a single rank, or of fake ranks: no thread, no port."""

    @override
    def fetch(self, unit: Unit) -> None:
        for section in unit.sections:
            section.bring_shard()

    @override
    def want(self, number: int, position: int) -> None: ...

    @override
    def on_want(self, handler: Callable[[int, int], None] | None) -> None: ...

    @override
    def check_present(self) -> None: ...

    raise_helper_error = close = check_present

    @override
    def shards_written(self, mark: Mark) -> None: ...

    @override
    def end_together(self, where: str, phase: str, *, cut_short: bool) -> str:
        return ""
