"""Boxes: n-dimensional parts of a tensor, and what flat ranges of two of them have in common.

A rank's part of a tensor is a box of it (its columns, its experts), and of the box's elements, in row-major order, a
range. Files hold such parts, and ranks of another layout want others; here is the arithmetic between them. It needs no
torch.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

Box = tuple[tuple[int, int], ...]
"""First index and end (exclusive) in each dimension."""

MOST_CUTS = 8
"""Dimensions along which one tensor may be cut."""


@dataclass(frozen=True)
class Patch:
    """Elements that two flat memories have in common, as an n-dimensional array in each.

    Attributes:
        shape: sizes, at least one.
        source, target: place of the first element in each of the two.
        source_strides, target_strides: elements from one index to the next, in each dimension.
    """

    shape: tuple[int, ...]
    source: int
    source_strides: tuple[int, ...]
    target: int
    target_strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def flat(self) -> bool:
        """Whether the elements follow each other in both memories."""
        return self.source_strides == self.target_strides == (1,)


def whole(shape: Sequence[int]) -> Box:
    """Return the box that is the whole tensor."""
    return tuple((0, size) for size in shape)


def sizes(box: Box) -> tuple[int, ...]:
    """Return the shape of a box."""
    return tuple(end - first for first, end in box)


def common(one: Box, other: Box) -> Box | None:
    """Return the box that two boxes have in common; None if they have no element in common."""
    found = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return found if all(first < end for first, end in found) else None


def moved(box: Box, origin: Sequence[int]) -> Box:
    """Return a box as it is counted from another origin."""
    return tuple((first - zero, end - zero) for (first, end), zero in zip(box, origin, strict=True))


def overlap(source: Box, start: int, stop: int, target: Box, low: int, high: int) -> Iterator[Patch]:
    """Yield what two flat ranges of boxes have in common.

    Args:
        source: a box; the first memory holds elements `[start, stop)` of it.
        start: first of these.
        stop: end of these.
        target: a box of the same tensor; the second memory holds elements `[low, high)` of it.
        low: first of these.
        high: end of these.

    Example: of a matrix of 2 x 4, the first memory has all, the second the two columns on the right.
        >>> list(overlap(((0, 2), (0, 4)), 0, 8, ((0, 2), (2, 4)), 0, 4))
        [Patch(shape=(2, 2), source=2, source_strides=(4, 1), target=0, target_strides=(2, 1))]
    """
    if source == target:
        first, last = max(start, low), min(stop, high)
        if first < last:
            yield Patch((last - first,), first - start, (1,), first - low, (1,))
        return
    if common(source, target) is None:
        return
    wanted = list(_bricks(target, low, high))
    for one in _bricks(source, start, stop):
        for other in wanted:
            shared = common(one, other)
            if shared is not None:
                yield _patch(shared, source, start, target, low)


def _bricks(box: Box, start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes that make up elements `[start, stop)` of a box: fewer than two for each dimension."""
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


def _patch(shared: Box, source: Box, start: int, target: Box, low: int) -> Patch:
    """Return where a box lies in both memories, in as few dimensions as can be."""
    one, other = _strides(source), _strides(target)
    dimensions: list[tuple[int, int, int]] = []
    for size, a, b in zip(sizes(shared), one, other, strict=True):
        if size == 1:
            continue
        if dimensions and dimensions[-1][1:] == (size * a, size * b):
            size *= dimensions.pop()[0]
        dimensions.append((size, a, b))
    shape, inner, outer = zip(*dimensions or [(1, 1, 1)], strict=True)
    return Patch(shape, _place(shared, source, one) - start, inner, _place(shared, target, other) - low, outer)


def _strides(box: Box) -> list[int]:
    lengths = sizes(box)
    return [math.prod(lengths[dimension + 1 :]) for dimension in range(len(lengths))]


def _place(inner: Box, box: Box, strides: Sequence[int]) -> int:
    return sum((a - b) * stride for (a, _), (b, _), stride in zip(inner, box, strides, strict=True))


def misfit(shape: Sequence[int], parts: Iterable[Box]) -> tuple[tuple[int, ...], int] | None:
    """Return the first element that is not in exactly one of some boxes, and in how many it is; None if there is none.

    The work is that of looking at every corner of every box once, however the boxes lie: where the count of boxes
    changes, there are corners, and they cancel out wherever it is one.

    Args:
        shape: of the tensor.
        parts: boxes inside of it.

    Raises:
        ValueError: the boxes cut the tensor along more than `MOST_CUTS` dimensions.

    Example:
        >>> misfit((2, 4), [((0, 2), (0, 2)), ((0, 1), (2, 4))])
        ((1, 2), 0)
    """
    parts = list(parts)
    if 0 in shape:
        return None
    cut = [d for d, size in enumerate(shape) if any(box[d] != (0, size) for box in parts)]
    if len(cut) > MOST_CUTS:
        raise ValueError(f"cut along {len(cut)} dimensions; at most {MOST_CUTS} are known")
    signs = [math.prod(ends) for ends in itertools.product((1, -1), repeat=len(cut))]
    changes: Counter[tuple[int, ...]] = Counter()
    for number, box in enumerate([whole(shape), *parts]):
        corners = itertools.product(*(box[d] for d in cut))
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
