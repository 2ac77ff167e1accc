"""Gradients that are copied together."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from shardwise import compat
from shardwise.zero.units.joined import GradientList, GradientPlaces


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("slots", [[(0, 6), (6, 4), (10, 1)], [(0, 6), (8, 4), (12, 0), (15, 1)]])
@pytest.mark.parametrize("absent", [(), (1,), (0, 1, 2)])
def test_join(slots: list[tuple[int, int]], absent: tuple[int, ...], whole: bool, dtype: torch.dtype) -> None:
    places = GradientPlaces(18, slots)
    gradients = GradientList(places, dtype)
    expected = torch.zeros(18, dtype=dtype)
    for number, (first, numel) in enumerate(slots):
        if number not in absent:
            values = torch.randn(numel).bfloat16()
            shaped = values.view(3, 2).t().contiguous().t() if numel == 6 else values.view(()) if numel == 1 else values
            gradients.put(number, shaped)
            expected[first : first + numel] = shaped.reshape(-1)
    flat = torch.full((18,), torch.nan, dtype=dtype)
    with mock.patch.object(compat, "_copies_together", compat._copies_together if whole else None):
        places.join(gradients.tensors, flat)
    assert torch.equal(flat, expected)


def test_a_second_gradient_is_added_to_the_first() -> None:
    first, second = torch.ones(2, 3), torch.full((2, 3), 2.0, requires_grad=True)
    gradients = GradientList(GradientPlaces(6, [(0, 6)]), torch.float32)
    assert gradients.put(0, first) is first
    assert gradients.put(0, second).tolist() == [3.0] * 6
    assert first.tolist() == [[1.0] * 3] * 2  # autograd may have given the same memory out twice
