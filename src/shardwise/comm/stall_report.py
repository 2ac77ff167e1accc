"""Words about a collective that waits too long: who is waited for, or that ranks wait for each other, and why.

Ranks that say the same share a line: a report is about as long on 1,024 ranks as on two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from shardwise.comm.rank_status import DIGEST, Launch, Place, Position

T = TypeVar("T")

_MOST_LINES = 16
"""Lines of different positions that are shown."""

Positions = Mapping[int, Position | None]
"""By rank; None: it has not answered."""


@dataclass(frozen=True)
class Confirmation:
    """What a rank that waits says a while later.

    Attributes:
        number: of its wait; it has moved on if this has changed.
        launched: collectives that other ranks wait for, which this one has launched.
        recent: by order, the number of a collective, and digests of that one and the later ones.
    """

    number: int
    launched: frozenset[Place] = frozenset()
    recent: Mapping[str, tuple[int, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """What is known of a collective that waits too long.

    Attributes:
        text: for people.
        stuck: the ranks wait for each other.
        absent: ranks that are waited for.
    """

    text: str
    stuck: bool
    absent: tuple[int, ...] = ()


def judge(
    places: Positions,
    own: int,
    confirmed: Mapping[int, Confirmation] | None = None,
    silent: Mapping[int, str] | None = None,
    parting: Sequence[str] = (),
) -> Report:
    """Return who is waited for, or that ranks wait for each other.

    Args:
        places: where the ranks are.
        own: this rank, which waits.
        confirmed: what they have said a while later; None: they have not been asked.
        silent: what has become of ranks that do not answer, as far as it is known.
        parting: where the ranks have first launched different collectives.

    >>> gather, reduce = Position("all_gather 'a' #4", line="t.py:3", seconds=9.0), Position("all_gather 'b' #4")
    >>> judge({0: gather, 1: reduce}, 0, dict.fromkeys((0, 1), Confirmation(-1))).stuck
    True
    >>> print(judge({0: gather, 1: Position(line="t.py:7")}, 0).text)
    rank 0 waits in all_gather 'a' #4 for 9 s at t.py:3, for rank 1:
      rank 1: is outside of collectives at t.py:7
    """
    here = places[own]
    assert here is not None
    there = {rank: place for rank, place in places.items() if place is not None and place.waits}
    if is_stuck(places, confirmed):
        text = "the ranks wait for each other in different collectives."
        return Report("\n".join([text, *_table(places, {}), *parting, *(_advice(there) or [_CHECK])]), True)
    absent = tuple(rank for rank in here.members or places if rank != own and rank in places and rank not in there)
    if absent:
        whom = f", for {ranks_in_words(absent)}"
    elif _may_end(here, there, confirmed or {}):
        whom = f"; all ranks are there, so {_slow(there)}"
    else:
        whom = "; others wait, too"
    others = {rank: place for rank, place in places.items() if rank != own}
    return Report("\n".join([f"rank {own} {here}{whom}:", *_table(others, silent or {})]), False, absent)


def _slow(there: Mapping[int, Position]) -> str:
    """Say why a collective may not end to which all of its ranks have come."""
    counts: dict[int, list[int]] = {}
    for rank, place in there.items():
        counts.setdefault(place.collectives, []).append(rank)
    if len(counts) == 1 or -1 in counts:
        return "the network between them is slow"
    shown = ", ".join(f"{count} on {ranks_in_words(ranks)}" for count, ranks in _few(counts))
    return (
        "the network between them is slow, or a device waits for a collective that the script has launched on some "
        f"ranks only (launched with torch.distributed in the default group: {shown})"
    )


def is_stuck(places: Positions, confirmed: Mapping[int, Confirmation] | None) -> bool:
    """Return whether all ranks wait, still in the same collectives, none of which all of its ranks have come to."""
    there = {rank: place for rank, place in places.items() if place is not None and place.waits}
    if confirmed is None or len(there) < len(places):
        return False
    if any(rank not in confirmed or confirmed[rank].number != place.number for rank, place in there.items()):
        return False
    return not any(_may_end(place, there, confirmed) for place in waits_of(places))


def waits_of(places: Positions) -> list[Position]:
    """Return the different collectives that ranks wait for."""
    return list({place.place: place for place in places.values() if place is not None and place.waits}.values())


def _may_end(waited: Position, there: Mapping[int, Position], confirmed: Mapping[int, Confirmation]) -> bool:
    """Return whether all ranks of a collective have come to it, as far as they wait."""
    members = [rank for rank in waited.members or there if rank in there]
    return all(
        there[rank].place == waited.place or (rank in confirmed and waited.place in confirmed[rank].launched)
        for rank in members
    )


def first_difference(recent: Mapping[int, tuple[int, str]]) -> tuple[int, list[int]] | None:
    """Return the number of the first collective of an order that ranks of one group have launched differently.

    Args:
        recent: of each rank, see `Confirmation.recent`.

    Returns:
        The number, and one rank for each way of launching it; None: as far as the ranks tell, there is none.

    >>> first_difference({0: (6, "aaaabbbbcccc"), 1: (7, "bbbbdddd"), 2: (7, "bbbbdddd")})
    (8, [0, 1])
    """
    begin = max(first for first, _ in recent.values())
    end = min(first + len(digests) // DIGEST for first, digests in recent.values())
    for turn in range(begin, end):
        ways: dict[str, int] = {}
        for rank, (first, digests) in recent.items():
            ways.setdefault(digests[(turn - first) * DIGEST :][:DIGEST], rank)
        if len(ways) > 1:
            return turn, list(ways.values())
    return None


def parting_in_words(launches: Mapping[int, Launch]) -> list[str]:
    """Say how ranks of one group have launched the collective in which they part."""
    sizes = len({size for _, _, size, _ in launches.values()}) > 1
    return [
        "They part here:",
        *(
            f"  rank {rank}: {what}{f' of {size} bytes' if sizes else ''} at {line}"
            for rank, (what, line, size, _) in launches.items()
        ),
    ]


def _table(places: Positions, silent: Mapping[int, str]) -> list[str]:
    """Return a line for each position; ranks whose positions differ by seconds only share one."""
    alike: dict[str, list[int]] = {}
    for rank, place in places.items():
        alike.setdefault(silent.get(rank, "") if place is None else str(replace(place, seconds=0.0)), []).append(rank)
    lines = []
    for ranks in list(alike.values())[:_MOST_LINES]:
        longest = max((place for rank in ranks if (place := places[rank])), key=lambda one: one.seconds, default=None)
        text = silent.get(ranks[0], "has not answered") if longest is None else str(longest)
        lines.append(f"  {ranks_in_words(ranks)}: {text}")
    rest = [rank for ranks in list(alike.values())[_MOST_LINES:] for rank in ranks]
    return [*lines, f"  {ranks_in_words(rest)}: elsewhere"] if rest else lines


def _advice(places: Mapping[int, Position]) -> list[str]:
    """Say what is wrong by name, where it can be known."""
    found: list[str] = []
    doing: dict[str, list[int]] = {}
    sizes: dict[tuple[str, str], dict[int, list[int]]] = {}
    ways: dict[str, dict[str, list[int]]] = {}
    for rank, place in places.items():
        name = f"{place.what.partition('(')[0]}()" if place.torch else place.doing
        doing.setdefault(name, []).append(rank)
        sizes.setdefault((place.what, place.kind), {}).setdefault(place.size, []).append(rank)
        if place.torch:
            ways.setdefault(name, {}).setdefault(f"{place.what} at {place.line}", []).append(rank)
    for (what, _), by_size in sizes.items():
        if len(by_size) > 1:
            shown = ", ".join(f"{size} bytes on {ranks_in_words(ranks)}" for size, ranks in _few(by_size))
            found.append(f"Ranks pass tensors of different sizes to {what}: {shown}.")
    for name, by_call in ways.items():
        if len({call.partition(" at ")[0] for call in by_call}) > 1:
            shown = ", ".join(f"{call} by {ranks_in_words(ranks)}" for call, ranks in _few(by_call))
            found.append(f"Ranks call {name} with different arguments: {shown}. Pass the same on every rank.")
    if len(doing) > 1:
        for method, ranks in doing.items():
            if method in _TOGETHER or method.startswith("torch."):
                lines = " and ".join(sorted({places[rank].call or places[rank].line for rank in ranks})[:4])
                others = [rank for rank in places if rank not in set(ranks)]
                found.append(
                    f"{method} has been called by {ranks_in_words(ranks)} at {lines}, and not by "
                    f"{ranks_in_words(others)}: every rank of its group has to call it, at the same point. Take it "
                    "out of `if rank == 0:`, or, if it comes after a loop over data, see that all ranks get the same "
                    "number of batches."
                )
    loaders: dict[str, list[int]] = {}
    for rank, place in places.items():
        if place.loader:
            loaders.setdefault(place.loader, []).append(rank)
    if len(loaders) > 1:
        shown = ", ".join(f"that of {ranks_in_words(ranks)} {text}" for text, ranks in _few(loaders))
        found.append(f"Loaders differ: {shown}")
    return found


def _few(groups: Mapping[T, list[int]]) -> list[tuple[T, list[int]]]:
    return list(groups.items())[:4]


_TOGETHER = tuple(
    f"engine.{name}()"
    for name in (
        "save_checkpoint",
        "load_checkpoint",
        "resume",
        "save_16bit_model",
        "module_state_dict",
        "load_module_state_dict",
        "export",
        "load_weights",
        "copy_to_memory",
        "memory_report",
        "gathered",
        "destroy",
    )
)


def ranks_in_words(ranks: Iterable[int]) -> str:
    """Name ranks.

    >>> ranks_in_words([3]), ranks_in_words([0, 2]), ranks_in_words([0, 1, 2, 3, 5, 7, 8])
    ('rank 3', 'ranks 0, 2', 'ranks 0-3, 5, 7, 8')
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    shown = ", ".join(texts[:_MOST_LINES]) + (f" and {len(texts) - _MOST_LINES} more" * (len(texts) > _MOST_LINES))
    return f"rank{'s' * (sum(map(len, runs)) > 1)} {shown}"


_CHECK = (
    "Look for a branch (`if rank == 0:`, a condition on data) that leaves out or adds a forward pass, backward(), "
    "step(), evaluation or save_checkpoint() on some ranks, and for loaders that give ranks different numbers of "
    "batches."
)
