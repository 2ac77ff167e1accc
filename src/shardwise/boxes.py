"""Boxes and regions: n-dimensional parts of a tensor, and the intersection of their flat ranges. No torch is needed.

A rank's part of a tensor is a box (columns, experts), or, of several tensors in a row (a fused projection), a region:
several ranges in a dimension, contiguous in the rank's memory. Of its part's elements, in row-major order, a rank has a
flat range. Files hold such parts, and ranks of another layout read others; this module has the arithmetic between them.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard, cast

Ends = tuple[int, int]  # first index and end (exclusive)

Box = tuple[Ends, ...]  # the ends in each dimension

# A box, or in some dimensions several ranges, which ascend and do not touch (`region`). Its elements have an index in
# one of the ranges of each dimension. In memory the ranges are contiguous.
Region = tuple[Ends | tuple[Ends, ...], ...]

# Maximum dimensions along which one tensor may be cut. Visiting all corners of a region costs at most `2 ** MOST_CUTS`
# for each of its ranges.
MOST_CUTS = 8


@dataclass(frozen=True)
class Patch:
    """Common elements of two flat memories, as an n-dimensional array in each."""

    shape: tuple[int, ...]  # at least one size
    source: int  # position of the first element
    source_strides: tuple[int, ...]  # elements from one index to the next, in each dimension
    target: int
    target_strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def flat(self) -> bool:
        """True if the elements are contiguous in both memories."""
        return self.source_strides == self.target_strides == (1,)


def whole(shape: Sequence[int]) -> Box:
    """Return the box of the whole tensor."""
    return tuple((0, size) for size in shape)


def region(dimensions: Iterable[Sequence[Any]]) -> Region:
    """Return the canonical form of a region: touching ranges are joined, and empty ones left out.

    Raises a ValueError if the ranges of a dimension do not ascend, or overlap.

    Example: one of two ranks' part of three fused matrices, and the part of a single rank.
        >>> region([[(0, 2), (4, 6), (8, 10)], (0, 3)]), region([[(0, 4), (4, 8), (8, 12)], (0, 3)])
        ((((0, 2), (4, 6), (8, 10)), (0, 3)), ((0, 12), (0, 3)))
    """
    return tuple(_joined(ends) for ends in dimensions)


def _joined(ends: Sequence[Any]) -> Ends | tuple[Ends, ...]:
    if is_range(ends):
        return int(ends[0]), int(ends[1])
    found: list[Ends] = []
    place = None
    for one, other in ends:
        first, end = int(one), int(other)
        if first > end or (place is not None and first < place):
            raise ValueError(f"expected ranges that ascend and do not overlap, found {[list(pair) for pair in ends]}")
        if first < end and found and first == found[-1][1]:
            found[-1] = (found[-1][0], end)
        elif first < end:
            found.append((first, end))
        place = end
    return tuple(found) if len(found) > 1 else found[0] if found else (0, 0)


def is_range(ends: Sequence[Any]) -> TypeGuard[Sequence[int]]:
    """Return True if a dimension of a region has one range."""
    return len(ends) == 2 and not isinstance(ends[0], (tuple, list))


def ranges(part: Region) -> tuple[tuple[Ends, ...], ...]:
    """Return all ranges of each dimension of a region; the result can be compared and sorted."""
    return tuple(((ends[0], ends[1]),) if is_range(ends) else cast(tuple[Ends, ...], ends) for ends in part)


def is_within(part: Region, shape: Sequence[int]) -> bool:
    """Return True if a region is inside of a tensor's shape."""
    return len(part) == len(shape) and all(
        0 <= first <= end <= size for some, size in zip(ranges(part), shape, strict=True) for first, end in some
    )


def sizes(part: Region) -> tuple[int, ...]:
    """Return the shape of a region in memory."""
    return tuple(
        ends[1] - ends[0] if is_range(ends) else sum(end - first for first, end in cast(tuple[Ends, ...], ends))
        for ends in part
    )


def meet(one: Region, other: Region) -> bool:
    """Return True if two regions of a tensor have an element in common."""
    return all(
        any(max(a, c) < min(b, d) for a, b in some for c, d in others)
        for some, others in zip(ranges(one), ranges(other), strict=True)
    )


def overlap(source: Region, start: int, stop: int, target: Region, low: int, high: int) -> Iterator[Patch]:
    """Yield the common elements of `[start, stop)` of `source` and `[low, high)` of `target`, regions of one tensor.

    Example: of a matrix of 2 x 4, the first memory has all, the second the two columns on the right.
        >>> list(overlap(((0, 2), (0, 4)), 0, 8, ((0, 2), (2, 4)), 0, 4))
        [Patch(shape=(2, 2), source=2, source_strides=(4, 1), target=0, target_strides=(2, 1))]
    """
    if source == target:
        first, last = max(start, low), min(stop, high)
        if first < last:
            yield Patch((last - first,), first - start, (1,), first - low, (1,))
        return
    if not meet(source, target):
        return
    one, other = sizes(source), sizes(target)
    shared = [_shared(some, others) for some, others in zip(ranges(source), ranges(target), strict=True)]
    strides = _strides(one), _strides(other)
    wanted = list(_bricks(whole(other), low, high))
    for mine in _bricks(whole(one), start, stop):
        for theirs in wanted:
            cut = [_within(*dimension) for dimension in zip(shared, mine, theirs, strict=True)]
            for runs in itertools.product(*cut):
                yield _patch(runs, strides[0], start, strides[1], low)


# Of a dimension of two memories: the first common index in each, and the number of indices.
_Run = tuple[int, int, int]


def _shared(some: Sequence[Ends], others: Sequence[Ends]) -> list[_Run]:
    """Return the common runs of two regions in one dimension; indices that are contiguous in both form one run."""
    found: list[_Run] = []
    place = 0
    for first, end in some:
        spot = 0
        for low, high in others:
            a, b = max(first, low), min(end, high)
            if a < b:
                run = (place + a - first, spot + a - low, b - a)
                if found and (found[-1][0] + found[-1][2], found[-1][1] + found[-1][2]) == run[:2]:
                    run = (*found[-1][:2], found.pop()[2] + run[2])
                found.append(run)
            spot += high - low
        place += end - first
    return found


def _within(runs: Sequence[_Run], mine: Ends, theirs: Ends) -> list[_Run]:
    found = []
    for one, other, count in runs:
        skip = max(mine[0] - one, theirs[0] - other, 0)
        count = min(mine[1] - one, theirs[1] - other, count)
        if skip < count:
            found.append((one + skip, other + skip, count - skip))
    return found


def _bricks(box: Box, start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes of elements `[start, stop)` of a box: fewer than two for each dimension."""
    if start >= stop:
        return
    if not box:
        yield ()
        return
    zero, rest = box[0][0], box[1:]
    row = math.prod(sizes(rest))
    (first, head), (last, tail) = divmod(start, row), divmod(stop, row)
    if first == last:
        yield from (((zero + first, zero + first + 1), *inner) for inner in _bricks(rest, head, tail))
        return
    if head:
        yield from (((zero + first, zero + first + 1), *inner) for inner in _bricks(rest, head, row))
        first += 1
    if first < last:
        yield ((zero + first, zero + last), *rest)
    yield from (((zero + last, zero + last + 1), *inner) for inner in _bricks(rest, 0, tail))


def _patch(runs: Sequence[_Run], one: Sequence[int], start: int, other: Sequence[int], low: int) -> Patch:
    """Return the common elements as a patch with as few dimensions as possible."""
    dimensions: list[tuple[int, int, int]] = []
    source, target = -start, -low
    for (first, second, size), a, b in zip(runs, one, other, strict=True):
        source, target = source + first * a, target + second * b
        if size == 1:
            continue
        if dimensions and dimensions[-1][1:] == (size * a, size * b):
            size *= dimensions.pop()[0]
        dimensions.append((size, a, b))
    shape, inner, outer = zip(*dimensions or [(1, 1, 1)], strict=True)
    return Patch(shape, source, inner, target, outer)


def _strides(lengths: Sequence[int]) -> list[int]:
    return [math.prod(lengths[dimension + 1 :]) for dimension in range(len(lengths))]


def cuts(shape: Sequence[int], parts: Sequence[Region]) -> list[int]:
    """Return the dimensions along which regions cut a tensor.

    Raises a ValueError if these are too many, or a region has too many corners.
    """
    cut = [d for d, size in enumerate(shape) if any(part[d] != (0, size) for part in parts)]
    if len(cut) > MOST_CUTS:
        raise ValueError(f"cut along {len(cut)} dimensions; at most {MOST_CUTS} are known")
    for part in parts:
        numbers = [1 if is_range(part[d]) else len(part[d]) for d in cut]
        if max(numbers, default=1) > 1 and math.prod(2 * n for n in numbers) > max(numbers) << MOST_CUTS:
            raise ValueError(
                f"a part has {' x '.join(map(str, numbers))} ranges along the dimensions that are cut; in all but one "
                "of them fewer are known"
            )
    return cut


def misfit(shape: Sequence[int], parts: Iterable[Region]) -> tuple[tuple[int, ...], int] | None:
    """Return the first element that is not in exactly one region, and its number of regions; None if there is none.

    The work is one visit of every corner of every region: the number of regions changes at corners only, and their
    changes cancel out if it is one everywhere. Raises a ValueError as `cuts` does.

    >>> misfit((2, 4), [((0, 2), (0, 2)), ((0, 1), (2, 4))])
    ((1, 2), 0)
    """
    parts = list(parts)
    if 0 in shape:
        return None
    cut = cuts(shape, parts)
    signs = [math.prod(ends) for ends in itertools.product((1, -1), repeat=len(cut))]
    changes: Counter[tuple[int, ...]] = Counter()
    for number, part in enumerate([whole(shape), *parts]):
        for box in itertools.product(*ranges(tuple(part[d] for d in cut))):
            corners = itertools.product(*box)
            for corner, sign in zip(corners, signs, strict=True):
                changes[corner] += sign if number else -sign
    wrong = min((corner for corner, count in changes.items() if count), default=None)
    if wrong is None:
        return None
    # All corners that come before it in every dimension have cancelled out: the count here differs by its own.
    place = [0] * len(shape)
    for dimension, index in zip(cut, wrong, strict=True):
        place[dimension] = index
    return tuple(place), 1 + changes[wrong]
