"""The arithmetic of boxes, compared with going through all elements."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise import boxes
from shardwise.boxes import Box, Patch

SHAPES = st.lists(st.integers(0, 4), max_size=4)


def elements(box: Box) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(first, end) for first, end in box)))


def inside(draw: st.DrawFn, shape: list[int]) -> Box:
    ends = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape]
    return tuple((first, end) for first, end in ends)


@st.composite
def ranges(draw: st.DrawFn) -> list[tuple[Box, int, int]]:
    """Return two flat ranges of boxes of one tensor, often of the same box."""
    shape = draw(SHAPES)
    one = inside(draw, shape)
    other = one if draw(st.booleans()) else inside(draw, shape)
    found = []
    for box in (one, other):
        count = math.prod(boxes.sizes(box))
        start, stop = sorted((draw(st.integers(0, count)), draw(st.integers(0, count))))
        found.append((box, start, stop))
    return found


def places(patch: Patch) -> list[tuple[int, int]]:
    found = []
    for index in itertools.product(*map(range, patch.shape)):
        source = patch.source + sum(i * stride for i, stride in zip(index, patch.source_strides, strict=True))
        target = patch.target + sum(i * stride for i, stride in zip(index, patch.target_strides, strict=True))
        found.append((source, target))
    return found


@given(ranges())
def test_overlaps_are_the_elements_that_both_have(pair: list[tuple[Box, int, int]]) -> None:
    (source, start, stop), (target, low, high) = pair
    one, other = elements(source)[start:stop], elements(target)[low:high]
    patches = list(boxes.overlap(source, start, stop, target, low, high))
    found = [place for patch in patches for place in places(patch)]
    assert all(one[a] == other[b] for a, b in found)
    assert sorted(one[a] for a, _ in found) == sorted(set(one) & set(other))
    assert len(patches) <= max(1, 2 * len(source)) ** 2
    if source == target:
        assert all(patch.flat for patch in patches)


@given(st.data())
def test_the_first_element_that_is_not_there_once_is_found(data: st.DataObject) -> None:
    draw: st.DrawFn = data.draw
    shape = draw(SHAPES)
    parts = [inside(draw, shape) for _ in range(draw(st.integers(0, 4)))]
    times = dict.fromkeys(elements(boxes.whole(shape)), 0)
    for box in parts:
        for element in elements(box):
            times[element] += 1
    wrong = min((element for element, count in times.items() if count != 1), default=None)
    assert boxes.misfit(shape, parts) == (None if wrong is None else (wrong, times[wrong]))


def test_parts_that_no_sequence_of_cuts_makes_are_known() -> None:
    # Around the middle, each a step further.
    wheel = [((0, 1), (0, 2)), ((0, 2), (2, 3)), ((2, 3), (1, 3)), ((1, 3), (0, 1)), ((1, 2), (1, 2))]
    assert boxes.misfit((3, 3), wheel) is None
    assert boxes.misfit((3, 3), wheel[:-1]) == ((1, 1), 0)


def test_cuts_along_many_dimensions_are_refused() -> None:
    shape = [2] * 40
    with pytest.raises(ValueError, match="cut along 40 dimensions; at most 8"):
        boxes.misfit(shape, [tuple((0, 1) for _ in shape)])
