"""What a rank finds in a gradient, and how reports read."""

from __future__ import annotations

import torch

from shardwise.precision import OverflowReport
from shardwise.precision.overflow import Extent, Found, first_not_finite


def test_what_is_found_in_runs() -> None:
    assert Found.of([]) == Found.of([torch.zeros(0)]) == Found(0, 0, 0.0)
    inf = float("inf")
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        runs = [torch.tensor([inf, -inf, float("nan"), -2.5], dtype=dtype), torch.tensor([1.0], dtype=dtype)]
        assert Found.of(runs) == Found(2, 1, 2.5)


def test_the_first_parameter_in_registration_order() -> None:
    assert first_not_finite(torch.tensor([1.0, 0.0])) is None
    assert first_not_finite(torch.zeros(0)) is None
    assert first_not_finite(torch.tensor([float("inf"), float("nan")])) == 0


def test_reports_in_words() -> None:
    lost = OverflowReport("forward", (0, 2), "up.weight", "up", 4, 1.0, 0, 4, 0.0)
    assert str(lost) == (
        "forward: the loss on ranks 0, 2 was not finite. First parameter: 'up.weight' (unit 'up'), of whose 4 elements "
        "0 are infinite and 4 NaN; the largest other is 0"
    )
    late = OverflowReport("backward", (1,), "up.weight", "up", 4, 1.0)
    assert str(late).endswith("First parameter: 'up.weight' (unit 'up')")
    total = OverflowReport("reduce", (), None, None, 0, 1.0, 0, 0, 0.0)
    assert str(total).endswith("Every parameter's gradient is finite, the norm of all is not")


def test_the_extent_in_words() -> None:
    nan = float("nan")
    assert Extent.of(torch.ones(2), ["a", "b"]) is None
    alone = Extent.of(torch.tensor([1.0, nan, 1.0]), ["a", "b", "c"])
    assert alone == Extent(1, 3, "b", "c") and alone.describe("backward") == "1 of 3 parameters has such a gradient"
    some = Extent.of(torch.tensor([nan, 1.0, nan]), ["a", "b", "c"])
    assert some == Extent(2, 3, "c", None)
    assert some.describe("backward") == "2 of 3 parameters have such gradients, the last 'c'"
    assert Extent(2, 3, "b", "c").describe("forward") == "2 of 3 parameters have such gradients, the last 'b'"
    report = OverflowReport("forward", (0,), "a", "u", 4, 1.0, extent=Extent(3, 3, "c", None), watched_for=5)
    assert "(unit 'u'). All 3 parameters have such gradients. Modules are watched for 5 steps from now on" in str(
        report
    )
