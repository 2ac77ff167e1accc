"""Peaks from sizes alone: what is gathered at once, what reductions hold, and which units had better stay whole.

Pure functions of bytes and orders, so that every rank comes to the same decisions, before a tensor exists.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from shardwise.memory import ActivationPlan

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
class QueuedReduction:
    """Reduction of one unit.

    Attributes:
        filled: bytes of its gradient, from its first parameter's until it is reduced.
        extra: further bytes while it is under way.
        parameters: `id()` of those whose gradients it waits for.
        alone: no other gradients are collected while it is under way.
        pieces: bytes of each of `parameters` where gradients stay as they are, and are not copied together.
        result: bytes of the reduced gradient, which stays.
        summed: it is there from the first parameter's gradient, not only from the reduction.
    """

    filled: int
    extra: int
    parameters: frozenset[int]
    alone: bool = False
    pieces: Mapping[int, int] = field(default_factory=dict)
    result: int = 0
    summed: bool = False


class ReductionQueue:
    """Units are reduced one after the other; while one is under way the next one's gradients are collected."""

    def __init__(self, jobs: Sequence[QueuedReduction]) -> None:
        self.jobs = jobs

    def most(self, activations: ActivationPlan | None, gathered: Sequence[tuple[int, int]] = ()) -> int:
        """Return the most bytes of buffers and results, or of buffers, results and activations, at once.

        Without activations: at the end, when all results are there.

        Args:
            activations: what else is there, and in which order gradients come.
            gathered: for each of its stretches, bytes of whole units when it begins, and after that; counted, too.
        """
        if activations is None:
            pairs = zip(self.jobs, [*self.jobs[1:], None], strict=False)
            return sum(job.result for job in self.jobs) + max(
                (job.filled + job.extra + (after.filled if after and not job.alone else 0) for job, after in pairs),
                default=0,
            )
        waiting = {parameter: place for place, job in enumerate(self.jobs) for parameter in job.parameters}
        missing = [len(job.parameters) for job in self.jobs]
        collecting: dict[int, int] = {}
        under_way = -1  # place of the last reduction that has been launched
        busy = False
        most = results = 0
        windows = gathered or [(0, 0)] * len(activations.stretches)
        for stretch, (whole, whole_after) in zip(activations.stretches, windows, strict=True):
            parameter, start = stretch.parameter, stretch.start + whole
            place = waiting.pop(parameter, None) if parameter is not None else None
            if place is not None and parameter is not None:
                job = self.jobs[place]
                busy = busy and (place in collecting or not self.jobs[under_way].alone)
                kept = job.pieces.get(parameter, 0)
                start -= kept  # it is among the temporaries
                if job.summed and place not in collecting:
                    results += job.result
                collecting[place] = collecting.get(place, 0) + kept if job.pieces else job.filled
                missing[place] -= 1
            most = max(most, start + results + self._bytes(collecting, under_way, busy))
            while under_way + 1 < len(self.jobs) and not missing[under_way + 1]:
                under_way, busy = under_way + 1, True
                collecting.pop(under_way, None)
                if not self.jobs[under_way].summed:
                    results += self.jobs[under_way].result
                most = max(most, start + results + self._bytes(collecting, under_way, busy))
            most = max(most, stretch.peak + whole_after + results + self._bytes(collecting, under_way, busy))
        return most

    def _bytes(self, collecting: Mapping[int, int], under_way: int, busy: bool) -> int:
        held = sum(collecting.values())
        return held + (self.jobs[under_way].filled + self.jobs[under_way].extra if busy else 0)
