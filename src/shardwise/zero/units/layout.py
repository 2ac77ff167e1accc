"""Layout arithmetic: where each element of a parameter lies in a unit, and which rank owns it.

A unit's parameters lie in sections (one per dtype, trainable or not, dtype in which gradients travel, stepped whole or
in parts); inside a section they are grouped in lanes (one per optimizer parameter group), each parameter at an aligned
boundary. A section is padded to a multiple of the number of ranks and split into equal ranges, one a rank; where ranks
lie in a grid of several dimensions, ranges of several ranks make one of a coarser level (`shardwise.comm.domain`). A
range is a list of segments, each of one lane: what an optimizer steps.

Pure functions of sizes; no tensor is touched. Invariants: every element of every parameter lies in exactly one rank's
range; every segment starts and ends at an aligned boundary, so that vectorised kernels treat an element the same
wherever the cuts between ranks and units fall.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from shardwise.registry import LogicalTensor


def alignment(dtype: torch.dtype, device_type: str) -> int:
    """Return the number of elements between aligned boundaries: 64 bytes (256 on CUDA) of fp32 and of `dtype`.

    Master weights and gradients are fp32 whatever the parameter's dtype, so the boundary holds for both.
    """
    size = 256 if device_type == "cuda" else 64
    return size // min(dtype.itemsize, 4)


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class ParamSlot:
    """Place of one parameter in a section: `index` in the registry, first element and number of elements."""

    index: int
    offset: int
    numel: int


@dataclass(frozen=True)
class GroupRange:
    """Range `[start, stop)` of a section that belongs to one optimizer parameter group (None: no optimizer)."""

    group: int | None
    start: int
    stop: int


@dataclass(frozen=True)
class ShardSlice:
    """A run of one parameter's elements inside a rank's range.

    Attributes:
        index: the parameter in the registry.
        start: first element, counted in the flattened parameter.
        stop: end (exclusive), counted in the flattened parameter.
        offset: where the run begins, counted from the start of the range.
    """

    index: int
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class FlatParam:
    """Parameters of one dtype and one dtype of gradients on the wire, all trainable or all frozen, laid out in one flat
    buffer of `numel` elements.

    `sizes` are those of the dimensions of the ranks' grid, innermost first. `wire_dtype` is the type in which the
    gradients travel; None: that in which they were computed. `whole`: the optimizer steps whole tensors of the section,
    each on one rank; elsewhere it steps the ranges.
    """

    dtype: torch.dtype
    trainable: bool
    slots: tuple[ParamSlot, ...]
    lanes: tuple[GroupRange, ...]
    numel: int
    sizes: tuple[int, ...]
    wire_dtype: torch.dtype | None = None
    whole: bool = False
    cut: bool = False

    @property
    def world(self) -> int:
        """Number of ranks."""
        return math.prod(self.sizes)

    @property
    def shard(self) -> int:
        """Number of elements in each rank's range at the finest level."""
        return self.numel // self.world

    def size(self, level: int) -> int:
        """Return the number of elements in each range at a level."""
        return self.numel // math.prod(self.sizes[:level])

    def range_of(self, place: int, level: int | None = None) -> tuple[int, int]:
        """Return the range `[start, stop)` of the flat buffer that a place has at a level (None: the finest)."""
        level = len(self.sizes) if level is None else level
        number = place // math.prod(self.sizes[level:])
        return number * self.size(level), (number + 1) * self.size(level)

    def segments(self, start: int, stop: int) -> list[GroupRange]:
        """Return the lanes that meet `[start, stop)`, cut to it, with positions counted from `start`.

        Padding at the end of the section belongs to the last lane.
        """
        cut = []
        for lane in self.lanes:
            first, last = max(lane.start, start), min(lane.stop, stop)
            if first < last:
                cut.append(GroupRange(lane.group, first - start, last - start))
        return cut

    @cached_property
    def gaps(self) -> list[tuple[int, int]]:
        """Ranges of the flat buffer that belong to no parameter: what alignment leaves between them and at the end."""
        ends = [slot.offset + slot.numel for slot in self.slots]
        starts = [slot.offset for slot in self.slots[1:]]
        return [(end, start) for end, start in zip(ends, [*starts, self.numel], strict=True) if end < start]

    @cached_property
    def _offsets(self) -> list[int]:
        return [slot.offset for slot in self.slots]

    def pieces(self, start: int, stop: int) -> list[ShardSlice]:
        """Return the runs of parameters inside `[start, stop)`, in order of position."""
        found = []
        first = max(0, bisect.bisect_right(self._offsets, start) - 1)
        for slot in self.slots[first:]:
            if slot.offset >= stop:
                break
            low, high = max(slot.offset, start), min(slot.offset + slot.numel, stop)
            if low < high:
                found.append(ShardSlice(slot.index, low - slot.offset, high - slot.offset, low - start))
        return found


def lay_out(
    tensors: Sequence[LogicalTensor],
    sizes: Sequence[int],
    device_type: str,
    whole: Collection[int] = (),
    cut: Collection[int] = (),
) -> tuple[FlatParam, ...]:
    """Lay the parameters of one unit out in sections; trainable sections come first.

    Args:
        tensors: the unit's parameters in registration order.
        sizes: of the dimensions of the grid of ranks that share the unit, innermost first.
        device_type: `cpu`, `cuda`, ...; decides the alignment.
        whole: parameter groups whose tensors are stepped whole.
        cut: indices of tensors of which ranks have different parts.
    """
    kinds: dict[tuple[bool, str, str, bool, bool], list[LogicalTensor]] = {}
    for tensor in tensors:
        wire = str(tensor.wire_dtype) if tensor.trainable else ""
        in_whole = tensor.trainable and tensor.group in whole
        in_parts = in_whole and tensor.index in cut
        kind = (not tensor.trainable, str(tensor.dtype), wire, in_whole, in_parts)
        kinds.setdefault(kind, []).append(tensor)
    sections = []
    for (frozen, _, _, in_whole, in_parts), members in sorted(kinds.items()):
        align = alignment(members[0].dtype, device_type)
        members = sorted(members, key=lambda t: (-1 if t.group is None else t.group, t.index))
        slots, lanes, offset, lane_start = [], [], 0, 0
        for position, tensor in enumerate(members):
            slots.append(ParamSlot(tensor.index, offset, tensor.numel))
            offset += round_up(tensor.numel, align)
            last = position + 1 == len(members)
            if last:
                offset = round_up(offset, align * math.prod(sizes))
            if last or members[position + 1].group != tensor.group:
                lanes.append(GroupRange(tensor.group, lane_start, offset))
                lane_start = offset
        wired = None if frozen else members[0].wire_dtype
        places = tuple(slots), tuple(lanes), offset, tuple(sizes)
        sections.append(FlatParam(members[0].dtype, not frozen, *places, wired, in_whole, in_parts))
    return tuple(sections)
