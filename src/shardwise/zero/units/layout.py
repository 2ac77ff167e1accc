"""Layout of a unit: position of each parameter in a flat parameter, and the range of each rank.

A unit has one flat parameter for each (dtype, trainable, dtype of gradients on the wire, stepped unsharded or in
ranges). Parameters are grouped by optimizer group (lanes), and begin at aligned boundaries. A flat parameter is padded
to a multiple of the number of ranks, and split into equal ranges. In a mesh of several dimensions, ranges of several
ranks make one range of a coarser level. An optimizer steps segments: parts of a range in one lane.

Every element lies in exactly one rank's range. Every segment begins and ends at an aligned boundary, hence vectorised
kernels treat an element alike at every world size and unit size.
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
    """Return the elements between aligned boundaries: 64 bytes (256 on CUDA) of `dtype` and of fp32."""
    size = 256 if device_type == "cuda" else 64
    return size // min(dtype.itemsize, 4)


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class ParamSlot:
    """Position of one parameter in a flat parameter: index in the registry, first element and number of elements."""

    index: int
    offset: int
    numel: int


@dataclass(frozen=True)
class GroupRange:
    """Range `[start, stop)` of a flat parameter that belongs to one optimizer group (None: no optimizer)."""

    group: int | None
    start: int
    stop: int


@dataclass(frozen=True)
class ShardSlice:
    """Range `[start, stop)` of flattened parameter `index` in a rank's range, where its first element is `offset`."""

    index: int
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class FlatParam:
    """Layout of a flat parameter. Its parameters have one dtype, one wire dtype, and are all trainable or all frozen.

    Attributes:
        numel: number of elements, padding included.
        sizes: sizes of the mesh dimensions, innermost first.
        wire_dtype: dtype in which gradients are reduced; None: the dtype in which they are computed.
        whole: the optimizer steps unsharded tensors, each on one rank, instead of ranges.
        cut: ranks have different parts of the tensors.
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
        """Return the range `[start, stop)` of a place at a level (None: the finest)."""
        level = len(self.sizes) if level is None else level
        number = place // math.prod(self.sizes[level:])
        return number * self.size(level), (number + 1) * self.size(level)

    def segments(self, start: int, stop: int) -> list[GroupRange]:
        """Return the parts of the lanes inside `[start, stop)`, counted from `start`, with padding at the end."""
        cut = []
        for lane in self.lanes:
            first, last = max(lane.start, start), min(lane.stop, stop)
            if first < last:
                cut.append(GroupRange(lane.group, first - start, last - start))
        return cut

    @cached_property
    def gaps(self) -> list[tuple[int, int]]:
        """Ranges that belong to no parameter: padding between parameters and at the end."""
        ends = [slot.offset + slot.numel for slot in self.slots]
        starts = [slot.offset for slot in self.slots[1:]]
        return [(end, start) for end, start in zip(ends, [*starts, self.numel], strict=True) if end < start]

    @cached_property
    def _offsets(self) -> list[int]:
        return [slot.offset for slot in self.slots]

    def pieces(self, start: int, stop: int) -> list[ShardSlice]:
        """Return the ranges of parameters inside `[start, stop)`, in order of position."""
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
    """Lay out the parameters of one unit in flat parameters, trainable ones first.

    `sizes` are those of the mesh dimensions over which the unit is sharded, innermost first. `whole` has optimizer
    groups whose tensors are stepped unsharded, `cut` the indices of tensors of which ranks have different parts.
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
