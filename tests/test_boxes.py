"""The arithmetic of boxes, compared with going through all elements."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise import boxes
from shardwise.boxes import Patch, Region

SHAPES = st.lists(st.integers(0, 4), max_size=4)


def elements(part: Region) -> list[tuple[int, ...]]:
    return list(itertools.product(*([i for ends in some for i in range(*ends)] for some in boxes.ranges(part))))


def inside(draw: st.DrawFn, shape: list[int]) -> Region:
    """Return a region of a tensor: in each dimension as many ranges as there are runs of chosen indices, or a range."""
    found: list[Any] = []
    for size in shape:
        first, end = sorted((draw(st.integers(0, size)), draw(st.integers(0, size))))
        chosen = draw(st.sets(st.integers(0, size - 1))) if size and draw(st.booleans()) else None
        found.append((first, end) if chosen is None else [(i, i + 1) for i in sorted(chosen)])
    return boxes.region(found)


@st.composite
def ranges(draw: st.DrawFn) -> list[tuple[Region, int, int]]:
    """Return two flat ranges of regions of one tensor, often of the same region."""
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
def test_overlaps_are_the_elements_that_both_have(pair: list[tuple[Region, int, int]]) -> None:
    (source, start, stop), (target, low, high) = pair
    one, other = elements(source)[start:stop], elements(target)[low:high]
    patches = list(boxes.overlap(source, start, stop, target, low, high))
    found = [place for patch in patches for place in places(patch)]
    assert all(one[a] == other[b] for a, b in found)
    assert sorted(one[a] for a, _ in found) == sorted(set(one) & set(other))
    assert boxes.meet(source, target) is bool(set(elements(source)) & set(elements(target)))
    most = math.prod(len(a) + len(b) - 1 for a, b in zip(boxes.ranges(source), boxes.ranges(target), strict=True))
    assert len(patches) <= max(1, 2 * len(source)) ** 2 * most
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


@given(st.data())
def test_a_region_has_one_form(data: st.DataObject) -> None:
    draw: st.DrawFn = data.draw
    size = draw(st.integers(0, 6))
    edges = sorted(draw(st.lists(st.integers(0, size), max_size=8)))
    pairs = list(zip(edges[::2], edges[1::2], strict=False))
    (found,) = boxes.region([pairs])
    some = boxes.ranges((found,))[0]
    assert [i for ends in some for i in range(*ends)] == [i for ends in pairs for i in range(*ends)]
    assert boxes.region([found]) == (found,)
    assert boxes.is_range(found) is (len(some) == 1)
    assert all(end < first for (_, end), (first, _) in itertools.pairwise(some))


@pytest.mark.parametrize("bad", [[(2, 4), (0, 1)], [(0, 3), (2, 4)], [(0, 1), (4, 2)]])
def test_ranges_that_do_not_ascend_are_refused(bad: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="expected ranges that ascend and do not overlap"):
        boxes.region([bad])


def test_regions_of_too_many_corners_are_refused() -> None:
    def combs(*numbers: int) -> Region:
        return boxes.region([[(2 * i, 2 * i + 1) for i in range(n)] for n in numbers])

    shape = (1000, 1000, 1)
    assert boxes.cuts(shape, [combs(300, 60, 1)]) == [0, 1]
    with pytest.raises(ValueError, match="300 x 200 ranges"):
        boxes.cuts(shape, [combs(300, 200, 1)])
