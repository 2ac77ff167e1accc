"""Buffers that collect gradients."""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
import torch

from shardwise import compat
from shardwise.memory import Accountant, Category
from shardwise.zero.units.gradient_buffers import FlatGradient, GradientList, GradientPlaces

SLOTS = ([(0, 6), (6, 4), (10, 1)], [(0, 6), (8, 4), (12, 0), (15, 1)])


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("absent", [(), (1,), (0, 1, 2)])
@pytest.mark.parametrize("kind", [FlatGradient, GradientList])
def test_collected(kind: type[FlatGradient | GradientList], absent: tuple[int, ...], whole: bool) -> None:
    for slots, dtype in itertools.product(SLOTS, (torch.float32, torch.bfloat16)):
        check_collected(kind, slots, absent, whole, dtype)


def check_collected(
    kind: type[FlatGradient | GradientList],
    slots: list[tuple[int, int]],
    absent: tuple[int, ...],
    whole: bool,
    dtype: torch.dtype,
) -> None:
    places, accountant = GradientPlaces(18, slots), Accountant()
    flat = torch.full((18,), torch.nan, dtype=dtype)
    listed = kind is GradientList
    gradients = GradientList(places, dtype, lambda: flat, accountant) if listed else FlatGradient(places, flat)
    expected = torch.zeros(18, dtype=dtype)
    for number, (first, numel) in enumerate(slots):
        if number not in absent:
            values = torch.randn(numel).bfloat16()
            shaped = values.view(3, 2).t().contiguous().t() if numel == 6 else values.view(()) if numel == 1 else values
            gradients.put(number, shaped)
            expected[first : first + numel] = shaped.reshape(-1)
    sizes = [2 * numel for number, (_, numel) in enumerate(slots) if number not in absent]
    assert accountant.live[Category.BUFFERS] == (sum(sizes) if listed else 0)
    with mock.patch.object(compat, "_copies_together", compat._copies_together if whole else None):
        assert gradients.complete() is flat
    assert torch.equal(flat, expected)
    assert gradients.present == [number not in absent for number in range(len(slots))]
    assert accountant.live[Category.BUFFERS] == (flat.nbytes if listed else 0)  # as the flat gradient only
    assert torch.equal(gradients.complete(), expected)


def test_a_second_gradient_is_added_to_the_first() -> None:
    first, second = torch.ones(2, 3), torch.full((2, 3), 2.0, requires_grad=True)
    places = GradientPlaces(6, [(0, 6)])
    for gradients in (
        GradientList(places, torch.float32, lambda: torch.empty(6), Accountant()),
        FlatGradient(places, torch.empty(6)),
    ):
        gradients.put(0, first)
        gradients.put(0, second)
        assert gradients.complete().tolist() == [3.0] * 6
        assert first.tolist() == [[1.0] * 3] * 2  # autograd may have returned the same memory twice
