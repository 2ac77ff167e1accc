"""Stragglers: the ranks that others wait for in collectives, and the seconds of waiting and of transfer.

A collective cannot end before the last rank has launched it. Seconds blocked in `wait()` before that launch are
waiting, caused by that rank; later ones are transfer. A late rank costs nothing if no rank is blocked meanwhile.
Records of ranks match by the number of the collective in its order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from shardwise.comm.clocks import LABEL, Clock, measure
from shardwise.comm.desync import order_of

if TYPE_CHECKING:
    from shardwise.comm.communicator import Communicator
    from shardwise.comm.ledger import Record

MOST_PARTS = 1 << 16
"""Collectives of all ranks together that are compared, because every rank receives them."""

Key = str
"""Names a collective: equal on its ranks, and different from all others."""


class Part(NamedTuple):
    """One rank's part in a collective: launch, seconds blocked, and end of the wait, in seconds of rank 0's clock."""

    key: Key
    op: str
    launched: float
    waited: float
    finished: float


@dataclass
class Shares:
    """Seconds of one rank, blocked until the last rank had launched (`waited`), or later (`transfer`).

    `caused` are seconds for which others were blocked until this rank had launched.
    """

    waited: float = 0.0
    caused: float = 0.0
    transfer: float = 0.0


@dataclass
class Stragglers:
    """Seconds for which ranks have waited for each other.

    Attributes:
        ranks: of each rank; `by_op`: the same for each operation.
        collectives: number of compared collectives.
        uncertainty: largest error of the ranks' clocks, in seconds.

    Example:
        >>> late = [[Part("gather/0", "all_gather", 0.0, 3.0, 3.0)], [Part("gather/0", "all_gather", 2.0, 1.0, 3.0)]]
        >>> found = blame(dict(enumerate(late)))
        >>> found.ranks[0], found.ranks[1]
        (Shares(waited=2.0, caused=0.0, transfer=1.0), Shares(waited=0.0, caused=2.0, transfer=1.0))
    """

    ranks: dict[int, Shares] = field(default_factory=dict)
    by_op: dict[str, dict[int, Shares]] = field(default_factory=dict)
    collectives: int = 0
    uncertainty: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the result for JSON, with text keys."""

        def texts(ranks: Mapping[int, Shares]) -> dict[str, Any]:
            return {str(rank): asdict(shares) for rank, shares in ranks.items()}

        by_op = {op: texts(ranks) for op, ranks in self.by_op.items()}
        return {**asdict(self), "ranks": texts(self.ranks), "by_op": by_op}

    def table(self) -> str:
        """Return a table of all ranks, in milliseconds."""
        lines = [f"{'rank':>6}{'waited for others':>20}{'others waited for it':>23}{'transfer':>12}   (ms)"]
        for rank, shares in sorted(self.ranks.items()):
            cells = f"{1e3 * shares.waited:>20.1f}{1e3 * shares.caused:>23.1f}{1e3 * shares.transfer:>12.1f}"
            lines.append(f"{rank:>6}{cells}")
        lines.append(f"{self.collectives} collectives; clocks of ranks are known to {1e3 * self.uncertainty:.3f} ms")
        return "\n".join(lines)


class Lateness(NamedTuple):
    """The last rank of a collective, its time of launch, and the seconds for which it blocked each other rank."""

    last: int
    came: float
    blocked: dict[int, float]


def lateness(parts: Mapping[int, Part]) -> Lateness:
    """Return the lateness of a collective from the parts of its ranks."""
    last = max(parts, key=lambda rank: parts[rank].launched)
    came = parts[last].launched
    blocked = {
        rank: max(0.0, min(part.finished, came) - (part.finished - part.waited))
        for rank, part in parts.items()
        if rank != last
    }
    return Lateness(last, came, blocked)


def blame(parts: Mapping[int, Iterable[Part]], uncertainty: float = 0.0) -> Stragglers:
    """Return the seconds for which ranks have waited for each other; collectives of a single rank are left out."""
    met: dict[Key, dict[int, Part]] = defaultdict(dict)
    for rank, own in parts.items():
        for part in own:
            met[part.key][rank] = part
    found = Stragglers({rank: Shares() for rank in sorted(parts)}, uncertainty=uncertainty)
    for together in met.values():
        if len(together) < 2:
            continue
        found.collectives += 1
        late = lateness(together)
        for rank, part in together.items():
            blocked = late.blocked.get(rank, 0.0)
            by_op = found.by_op.setdefault(part.op, {rank: Shares() for rank in found.ranks})
            for shares in (found.ranks, by_op):
                shares[rank].waited += blocked
                shares[rank].transfer += max(0.0, part.waited - blocked)
                shares[late.last].caused += blocked
    return found


def key_of(record: Record) -> Key:
    """Return the name of a record's collective, equal on all ranks; empty without an order."""
    return f"{order_of(record)}:{record.turn}" if record.kind and len(record.members) > 1 else ""


def parts_of(records: Iterable[Record], to_first: Callable[[float], float]) -> list[Part]:
    """Return this rank's parts in the collectives that have ended; `to_first` converts times to rank 0's clock."""
    parts = []
    for record in records:
        key = key_of(record)
        if key and record.finished is not None and record.label != LABEL:
            parts.append(
                Part(key, record.op, to_first(record.launched), record.waited or 0.0, to_first(record.finished))
            )
    return parts


def compare(comm: Communicator, since: int = 0) -> Stragglers:
    """Compare the newest collectives in the ledgers of all ranks (all ranks call), from sequence number `since` on.

    The number of collectives falls with the number of ranks: 64 each with 1,024 ranks, the whole ledger with up to 16.
    Where the host does not wait for collectives (NCCL), only blocked seconds count.
    """
    records = list(comm.ledger.records(since))
    clock: Clock = measure(comm)
    own = parts_of(records, lambda at: at + clock.offset)[-max(1, MOST_PARTS // comm.world) :]
    rank = comm.members[comm.rank] if comm.world > 1 else 0
    everyone = comm.exchange([rank, clock.uncertainty, own], "stragglers")
    found = {number: [Part(*part) for part in parts] for number, _, parts in everyone}
    return blame(found, max(uncertainty for _, uncertainty, _ in everyone))
