"""Layout arithmetic: every element has one place and one owner, every boundary is aligned."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.registry import LogicalTensor
from shardwise.zero.units.layout import FlatParam, alignment, lay_out

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8)


@st.composite
def parameters(draw: st.DrawFn) -> list[LogicalTensor]:
    tensors = []
    for index in range(draw(st.integers(1, 12))):
        trainable = draw(st.booleans())
        dtype = draw(st.sampled_from(DTYPES[:3] if trainable else DTYPES))
        shape = tuple(draw(st.lists(st.integers(0, 40), max_size=2)))
        group = draw(st.integers(0, 2)) if trainable else draw(st.sampled_from([None, 1]))
        tensors.append(LogicalTensor(index, f"p{index}", (), shape, dtype, dtype, trainable, group))
    return tensors


def sections_of(tensors: list[LogicalTensor], world: int, device: str) -> tuple[FlatParam, ...]:
    return lay_out(tensors, [world], device)


@given(parameters(), st.integers(1, 9), st.sampled_from(["cpu", "cuda"]))
def test_every_element_lies_in_exactly_one_range(tensors: list[LogicalTensor], world: int, device: str) -> None:
    seen = {tensor.index: torch.zeros(tensor.numel, dtype=torch.int64) for tensor in tensors}
    for section in sections_of(tensors, world, device):
        assert section.shard * world == section.numel
        places = torch.zeros(section.numel, dtype=torch.int64)
        for rank in range(world):
            start, stop = section.range_of(rank)
            for piece in section.pieces(start, stop):
                seen[piece.index][piece.start : piece.stop] += 1
                places[start + piece.offset : start + piece.offset + piece.stop - piece.start] += 1
        assert int(places.max()) <= 1 if places.numel() else True
    for tensor in tensors:
        assert bool((seen[tensor.index] == 1).all()), tensor


@given(parameters(), st.integers(1, 9), st.sampled_from(["cpu", "cuda"]))
def test_pieces_are_where_slots_say(tensors: list[LogicalTensor], world: int, device: str) -> None:
    for section in sections_of(tensors, world, device):
        slots = {slot.index: slot for slot in section.slots}
        flat = torch.full((section.numel,), -1)
        for slot in section.slots:
            flat[slot.offset : slot.offset + slot.numel] = torch.arange(slot.numel)
        for rank in range(world):
            start, stop = section.range_of(rank)
            for piece in section.pieces(start, stop):
                found = flat[start:stop][piece.offset : piece.offset + piece.stop - piece.start]
                assert found.tolist() == list(range(piece.start, piece.stop))
                assert slots[piece.index].numel == tensors[piece.index].numel


@given(parameters(), st.integers(1, 9), st.sampled_from(["cpu", "cuda"]))
def test_segments_are_aligned_and_of_one_group(tensors: list[LogicalTensor], world: int, device: str) -> None:
    for section in sections_of(tensors, world, device):
        align = alignment(section.dtype, device)
        assert section.numel % (align * world) == 0
        assert all(slot.offset % align == 0 for slot in section.slots)
        bytes_apart = 256 if device == "cuda" else 64
        assert (align * section.dtype.itemsize) % bytes_apart == 0
        assert (align * torch.float32.itemsize) % bytes_apart == 0
        group_of = {tensor.index: tensor.group for tensor in tensors}
        for rank in range(world):
            start, stop = section.range_of(rank)
            position = 0
            for lane in section.segments(start, stop):
                assert lane.start == position and lane.start % align == 0 and lane.stop % align == 0
                position = lane.stop
                for piece in section.pieces(start + lane.start, start + lane.stop):
                    assert group_of[piece.index] == lane.group
            assert position == section.shard


@given(parameters(), st.integers(1, 9))
def test_sections_are_of_one_kind_and_trained_ones_come_first(tensors: list[LogicalTensor], world: int) -> None:
    sections = sections_of(tensors, world, "cpu")
    kinds = [(section.trainable, section.dtype) for section in sections]
    assert len(set(kinds)) == len(kinds)
    assert [section.trainable for section in sections] == sorted((s.trainable for s in sections), reverse=True)
    for section in sections:
        for slot in section.slots:
            tensor = tensors[slot.index]
            assert (tensor.trainable, tensor.dtype, tensor.numel) == (section.trainable, section.dtype, slot.numel)
    assert sorted(slot.index for section in sections for slot in section.slots) == list(range(len(tensors)))


@given(parameters(), st.integers(1, 9))
def test_padding_is_less_than_a_boundary_for_each_parameter_and_rank(tensors: list[LogicalTensor], world: int) -> None:
    for section in sections_of(tensors, world, "cpu"):
        align = alignment(section.dtype, "cpu")
        used = sum(slot.numel for slot in section.slots)
        assert section.numel - used < align * (len(section.slots) + world)


@given(parameters(), st.integers(1, 9), st.sampled_from(["cpu", "cuda"]))
def test_gaps_are_what_no_parameter_covers(tensors: list[LogicalTensor], world: int, device: str) -> None:
    for section in sections_of(tensors, world, device):
        covered = torch.zeros(section.numel, dtype=torch.int64)
        for slot in section.slots:
            covered[slot.offset : slot.offset + slot.numel] += 1
        for start, stop in section.gaps:
            assert start < stop
            covered[start:stop] += 1
        assert bool((covered == 1).all())
