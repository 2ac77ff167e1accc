"""Decisions from sizes: units that stay unsharded, and units that are reduced one after the other.

All functions compute with bytes and orders only, hence all ranks decide alike before tensors are allocated.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

Orders = tuple[Sequence[int], Sequence[int]]
"""Indices of units in the order of the forward and of the backward pass."""


def gathered_together(
    orders: Orders, sharded: Collection[int], numels: Mapping[int, int], ahead: int | None, kept: Collection[int] = ()
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield (units held around it, the unit and prefetched ones) for each unit and pass: the sets unsharded together.

    A unit encloses another if it comes first in the order of the pass and in the opposite order: it is used before and
    after the other. `ahead` is the number of elements prefetched beyond the next unit (None: no prefetching). Units
    `kept` stay unsharded from their all-gather to the end of the pass.
    """
    forward, backward = orders
    for order, other in ((forward, backward), (backward, forward)):
        sequence = [index for index in order if index in sharded]
        place = {index: position for position, index in enumerate(other)}
        # Last place, in the opposite order, of the units from here on. A held unit behind it encloses no more units.
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
    """Return the units that stay unsharded, because resharding them would not lower the peak.

    Memory of parameters peaks at the resident bytes plus the largest set of units that are unsharded together. Keeping
    a unit costs the bytes of the other ranks' shards, and saves its place in that set. A unit in every such set (a tied
    embedding, used first and last) is unsharded at the peak anyway, and its shard would be added.

    Greedy: of the largest set, keep the unit that gives the least peak (a held unit, or the largest of the others), and
    repeat; the least peak on the way is taken. Then each unit of the largest set is tried once more. Of equal peaks,
    the one with fewer all-gathers is taken. `whole` and `shard` are bytes of units and of this rank's shards; units
    `already` stay unsharded in any case.

    Example:
        >>> both = ([0, 1, 2], [2, 1, 0])
        >>> sizes, parts = {0: 8, 1: 8, 2: 8}, {0: 4, 1: 4, 2: 4}
        >>> sorted(best_whole(both, sizes, parts, sizes, 0))  # on two ranks two unsharded units save nothing
        [0, 1, 2]
        >>> sorted(best_whole(both, sizes, {0: 1, 1: 1, 2: 1}, sizes, 0))  # on eight they do
        []
    """

    def peak_of(units: frozenset[int]) -> tuple[int, list[int], list[int]]:
        most, largest = 0, (list[int](), list[int]())
        for around, coming in gathered_together(orders, whole.keys() - units, numels, ahead):
            size = sum(whole[index] for index in (*around, *coming))
            if size > most or not largest[1]:
                most, largest = size, (around, coming)
        return _resident(whole, shard, units) + most, *largest

    kept = frozenset(already)
    best, least = frozenset(whole), sum(whole.values())
    peak, around, coming = peak_of(kept)
    # Keeping more units raises the resident bytes.
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
    """Bytes that the reduction of one unit takes.

    Attributes:
        sent: gradient on the wire.
        received: gradients received from peers, and their sum if it is added to that of earlier micro-batches.
        received_of_sum: the same for a sum of micro-batches, which is reduced once.
        own: this rank's part of the sum.
        whole: sum of the micro-batches, if accumulated before it is reduced.
    """

    unit: int
    sent: int
    received: int
    received_of_sum: int
    own: int
    whole: int


def reduced_alone(queue: Sequence[ReductionSizes]) -> frozenset[int]:
    """Return the units whose reduction ends before other gradients are collected, if micro-batches are accumulated.

    Because the next unit's gradient is collected while a unit is reduced, on few ranks two large units would take more
    memory than whole sums of micro-batches, which are reduced one after the other.

    Example:
        >>> two = [ReductionSizes(unit, 8, received=4, received_of_sum=4, own=4, whole=8) for unit in range(2)]
        >>> sorted(reduced_alone(two)), sorted(reduced_alone(two * 4))
        ([0], [])
    """
    limit, held = 0, sum(sizes.whole for sizes in queue)
    for sizes in queue:
        held += sizes.own
        limit = max(limit, held + sizes.received_of_sum)
        held -= sizes.whole
    kept = sum(sizes.own for sizes in queue)
    return frozenset(
        sizes.unit for sizes, after in pairwise(queue) if kept + sizes.sent + sizes.received + after.sent > limit
    )
