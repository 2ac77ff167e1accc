"""Decisions from sizes alone: which units had better stay whole, and which are reduced one after the other.

Pure functions of bytes and orders, so that every rank comes to the same decisions, before a tensor exists.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

Orders = tuple[Sequence[int], Sequence[int]]
"""Indices of units in the order of the forward pass, and in that of the backward pass."""


def gathered_together(
    orders: Orders, sharded: Collection[int], numels: Mapping[int, int], ahead: int | None, kept: Collection[int] = ()
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the units that are whole at once, for each unit and pass in turn: those held around it; it and those ahead.

    A unit that comes before another in both orders, that of the pass and that of the opposite one, encloses it: it is
    needed before and after, and held in between.

    Args:
        orders: of all units.
        sharded: units that are gathered at all.
        numels: elements of the units.
        ahead: elements that may be gathered beyond the next unit; None if not even that is.
        kept: units that are held from their gather to the end of the pass.
    """
    forward, backward = orders
    for order, other in ((forward, backward), (backward, forward)):
        sequence = [index for index in order if index in sharded]
        place = {index: position for position, index in enumerate(other)}
        # Of the places from here on the last: what comes after it in the opposite pass encloses nothing more.
        latest = list(accumulate((place[index] for index in reversed(sequence)), max))[::-1]
        held: list[int] = []
        for position, index in enumerate(sequence):
            held = [b for b in held if b in kept or place[b] < latest[position]]
            around = [b for b in held if b in kept or place[b] < place[index]]
            held.append(index)
            coming = [index]
            budget = ahead
            for distance, following in enumerate(sequence[position + 1 :]):
                if budget is None:
                    break
                budget -= numels[following]
                if distance > 0 and budget < 0:
                    break
                coming.append(following)
            yield around, coming


def best_whole(
    orders: Orders,
    whole: Mapping[int, int],
    shard: Mapping[int, int],
    numels: Mapping[int, int],
    ahead: int | None,
    already: Collection[int] = (),
) -> frozenset[int]:
    """Return the units whose release would not lower the peak: they stay gathered.

    Memory of parameters peaks at their resident bytes and the largest set of units that is gathered at once. To keep a
    unit costs what the other ranks would have held of it, and saves its place in that set. A unit that is in every such
    set (a tied embedding, needed first and last) is whole at the peak anyway, and its shard would come on top.

    Greedy: of the largest set the unit is kept with which the peak is least (one that is held around others, or the
    largest of the rest), and so on; the least peak on the way counts, and that of all units kept, which is the peak
    without sharded parameters. In the end each unit of the largest set is tried once more. Of equal peaks the one with
    fewer gathers is taken.

    Args:
        orders: of all units.
        whole: bytes of each unit when it is gathered.
        shard: bytes of this rank's part of it.
        numels: elements of the units.
        ahead: see `gathered_together`.
        already: units that stay gathered in any case.

    Example:
        >>> both = ([0, 1, 2], [2, 1, 0])
        >>> sizes, parts = {0: 8, 1: 8, 2: 8}, {0: 4, 1: 4, 2: 4}
        >>> sorted(best_whole(both, sizes, parts, sizes, 0))  # on two ranks two gathered units save nothing
        [0, 1, 2]
        >>> sorted(best_whole(both, sizes, {0: 1, 1: 1, 2: 1}, sizes, 0))  # on eight they do
        []
    """

    def peak_of(units: frozenset[int]) -> tuple[int, list[int], list[int]]:
        """Most bytes of parameters at once if these units are kept, and the units that are gathered then."""
        most, largest = 0, (list[int](), list[int]())
        for around, coming in gathered_together(orders, whole.keys() - units, numels, ahead):
            size = sum(whole[index] for index in (*around, *coming))
            if size > most or not largest[1]:
                most, largest = size, (around, coming)
        return _resident(whole, shard, units) + most, *largest

    kept = frozenset(already)
    best, least = frozenset(whole), sum(whole.values())
    peak, around, coming = peak_of(kept)
    # Keeping more raises what is resident.
    while len(kept) < len(whole) and _resident(whole, shard, kept) <= least:
        if peak < least or (peak == least and len(kept) > len(best)):
            best, least = kept, peak
        tried = [(peak_of(kept | {unit}), unit) for unit in (*around, max(coming, key=lambda i: (whole[i], -i)))]
        (peak, around, coming), unit = min(tried, key=lambda found: (found[0][0], -whole[found[1]], found[1]))
        kept = kept | {unit}
    while len(best) < len(whole):
        _, around, coming = peak_of(best)
        peak, unit = min((peak_of(best | {unit})[0], unit) for unit in (*around, *coming))
        if peak > least:
            break
        best, least = best | {unit}, peak
    return best


def _resident(whole: Mapping[int, int], shard: Mapping[int, int], kept: frozenset[int]) -> int:
    return sum(size if index in kept else shard[index] for index, size in whole.items())


@dataclass(frozen=True)
class ReductionSizes:
    """What reducing one unit takes, in bytes.

    Attributes:
        unit: its index.
        sent: its gradient as it travels.
        received: what arrives of the peers'.
        own: this rank's part of the sum.
        whole: the sum of micro-batches if it were formed before it is reduced.
    """

    unit: int
    sent: int
    received: int
    own: int
    whole: int


def reduced_alone(queue: Sequence[ReductionSizes]) -> frozenset[int]:
    """Return the units whose reduction is over before other gradients are collected, if micro-batches are added up.

    While a unit is reduced the next one's gradient is collected. On few ranks, two units that are much of the model
    would then take more memory than whole sums of micro-batches, which are reduced one after the other.

    Args:
        queue: all units with gradients, in the order in which they are reduced.

    Example:
        >>> two = [ReductionSizes(unit, sent=8, received=4, own=4, whole=8) for unit in range(2)]
        >>> sorted(reduced_alone(two)), sorted(reduced_alone(two * 4))
        ([0], [])
    """
    limit, held = 0, sum(sizes.whole for sizes in queue)
    for sizes in queue:
        held += sizes.own
        limit = max(limit, held + sizes.received)
        held -= sizes.whole
    kept = sum(sizes.own for sizes in queue)
    return frozenset(
        sizes.unit for sizes, after in pairwise(queue) if kept + sizes.sent + sizes.received + after.sent > limit
    )
