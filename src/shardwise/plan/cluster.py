"""Rates of machines that are not measured: cards and links from data sheets, with stated efficiencies."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Mapping
from importlib import resources
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from shardwise.errors import UsageError
from shardwise.plan.clock import Costs
from shardwise.plan.events import Launch, Operator, Recorder

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


class _Listed(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    source: str
    bandwidth: float = Field(gt=0)


class Link(_Listed):
    """A link: `bandwidth` in bytes a second in one direction, `latency` in seconds of a step of a ring."""

    latency: float = Field(ge=0)


class Card(_Listed):
    """A card, or one device of a card.

    Attributes:
        memory: bytes; `bandwidth`: of the memory, bytes a second.
        flops: operations a second by type, such as "bf16", dense.
        inside: name of the link to other cards of the machine; `host`: of the link to the machine's memory.
    """

    memory: float = Field(gt=0)
    flops: dict[str, float]
    inside: str
    host: str


class Host(_Listed):
    """A machine without its cards: `bandwidth` of its memory, and of its disk, in bytes a second."""

    read: float = Field(gt=0)
    write: float = Field(gt=0)


class Efficiencies(BaseModel):
    """Shares of the data sheets' rates that programs reach, and `host`: seconds of the host for each operator."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    compute: float = Field(gt=0, le=1)
    memory: float = Field(gt=0, le=1)
    links: float = Field(gt=0, le=1)
    host: float = Field(ge=0)


class Sheets(BaseModel):
    """The file `cards.toml`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    efficiencies: Efficiencies
    machine: Host
    cards: dict[str, Card]
    links: dict[str, Link]


@functools.cache
def sheets() -> Sheets:
    """Return all cards and links that are known, by name."""
    text = resources.files("shardwise.plan").joinpath("cards.toml").read_text("utf-8")
    return Sheets.model_validate(tomllib.loads(text))


class Path(NamedTuple):
    """What a group's collectives go through: `link` is the slowest on it; `bandwidth` in bytes a second."""

    link: str
    bandwidth: float
    latency: float


class Cluster(BaseModel):
    """Machines with cards of one kind. Rank r is on machine r // ranks_per_machine.

    Attributes:
        inside: link between cards of a machine.
        between: link between machines; None: there is one machine. `adapters`: how many of it a machine has.
        host_path: link of each card to its machine.

    Example:
        >>> cluster = Cluster.of("h100", "8xinfiniband-ndr", 8)
        >>> cluster.path((0, 1, 2, 3)).link, cluster.path((0, 8)).link
        ('NVLink 4', 'InfiniBand NDR')
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    card: Card
    inside: Link
    between: Link | None = None
    host_path: Link
    machine: Host
    ranks_per_machine: int = Field(ge=1)
    adapters: int = Field(default=1, ge=1)
    efficiencies: Efficiencies

    @classmethod
    def of(
        cls, card: str, link: str | None, ranks_per_machine: int, efficiencies: Efficiencies | None = None
    ) -> Cluster:
        """Return a cluster of names in `sheets()`. `link`: NAME, or NxNAME for N adapters a machine; None: one machine.

        Raises UsageError for an unknown name, with all known ones.
        """
        known = sheets()
        chosen = _found(known.cards, card, "card")
        count, times, name = (link or "").partition("x")
        adapters, name = (int(count), name) if times and count.isdecimal() else (1, link or "")
        if adapters < 1:
            raise UsageError(f"{link}: a machine has 1 adapter or more")
        return cls(
            card=chosen,
            inside=known.links[chosen.inside],
            host_path=known.links[chosen.host],
            machine=known.machine,
            between=None if link is None else _found(known.links, name, "link"),
            ranks_per_machine=ranks_per_machine,
            adapters=adapters,
            efficiencies=efficiencies or known.efficiencies,
        )

    @property
    def origin(self) -> str:
        """A sentence that says where the rates come from."""
        shares, card = self.efficiencies, self.card
        found = (
            f"rates of data sheets, not measured: {card.name} ({card.source}), of which {shares.compute:.0%} of the "
            f"FLOP/s, {shares.memory:.0%} of the memory's and {shares.links:.0%} of the links' bandwidth are taken; "
            f"{self.ranks_per_machine} ranks a machine, {self.inside.name} inside"
        )
        return found if self.between is None else f"{found}, {self.adapters} x {self.between.name} between machines"

    def path(self, members: tuple[int, ...], *, each_to_each: bool = False) -> Path:
        """Return what a ring of ranks goes through. Raises UsageError without a link between their machines.

        Groups of which a machine has few members share its adapters with the other groups of the machine; so do the
        members of one that exchanges each with each.
        """
        here = Counter(rank // self.ranks_per_machine for rank in members)
        hops = len(members) - len(here)
        bandwidth, link, latency = self.inside.bandwidth, self.inside, hops * self.inside.latency
        if len(here) > 1:
            if self.between is None:
                raise UsageError(
                    f"ranks are on {len(here)} machines of {self.ranks_per_machine} ranks: give the link between them "
                    "(--link)"
                )
            sharers = self.ranks_per_machine / (1 if each_to_each else min(here.values()))
            outer = self.between.bandwidth * self.adapters / sharers
            latency += (len(here) - 1) * self.between.latency
            if outer < bandwidth or not hops:
                bandwidth, link = outer, self.between
        return Path(link.name, bandwidth * self.efficiencies.links, latency)

    @property
    def peaks(self) -> Mapping[str, float]:
        """FLOP/s of a card by type, of the data sheet."""
        return self.card.flops

    @property
    def disk(self) -> tuple[float, float]:
        """Bytes/s that a rank reads and writes while all ranks of its machine do."""
        return self.machine.read / self.ranks_per_machine, self.machine.write / self.ranks_per_machine

    @property
    def host_link(self) -> float:
        """Bytes/s between a card and its machine."""
        return self.host_path.bandwidth * self.efficiencies.links

    def complete(self, recorder: Recorder, ranks: int, limit: float) -> None:
        """Do nothing, because data sheets have everything."""

    def costs(self, ranks: int) -> Costs:
        """Return seconds of operators and collectives."""
        peaks, memory = self.card.flops, self.card.bandwidth * self.efficiencies.memory
        host = self.machine.bandwidth / self.ranks_per_machine * self.efficiencies.memory
        paths: dict[tuple[tuple[int, ...], bool], Path] = {}

        def operator(one: Operator) -> float:
            if one.on_host:
                return one.moved / host
            if not one.flops:
                return one.moved / memory
            if one.dtype not in peaks:
                raise UsageError(
                    f"{self.card.name} has no rate of {one.dtype or 'unknown type'} in its data sheet, only of "
                    f"{', '.join(peaks)}: choose another precision"
                )
            return one.flops / (peaks[one.dtype] * self.efficiencies.compute)

        def path(launch: Launch) -> Path:
            key = launch.members or tuple(range(launch.ranks)), launch.op == "all_to_all"
            if key not in paths:
                paths[key] = self.path(key[0], each_to_each=key[1])
            return paths[key]

        def collective(launch: Launch) -> float:
            share = (launch.ranks - 1) / launch.ranks if launch.op != "broadcast" else 1.0
            found = path(launch)
            return _RING[launch.op] * (found.latency + share * launch.size / found.bandwidth)

        return Costs(
            operator=operator,
            collective=collective,
            link=lambda launch: path(launch).link,
            host=self.efficiencies.host,
            asynchronous=True,
        )


_RING = {"all_gather": 1, "exchange": 1, "reduce_scatter": 1, "all_reduce": 2, "broadcast": 1, "all_to_all": 1}
"""How often the message goes around the ring."""


def _found(known: Mapping[str, Any], name: str, what: str) -> Any:
    if name not in known:
        raise UsageError(f"{name!r}: no {what} of this name is known; known are {', '.join(known)}")
    return known[name]
