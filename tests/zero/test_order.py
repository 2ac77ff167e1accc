"""Positions of all-gathers and reductions in a pass, from which follows which rank may wait for which."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.zero.passes.order import Phase, UnitOrder


def unit(index: int, *, sharded: bool = True) -> Any:
    return SimpleNamespace(index=index, sharded=sharded, trainable=[object()], pins=0)


@pytest.mark.parametrize("on_device", [False, True])
def test_a_unit_that_is_not_sharded_launches_no_all_gather(on_device: bool) -> None:
    """The layers 0 and 1 run before and after unit 2, which is reduced first and launches nothing before that.

    A peer may therefore wait in that reduction without having launched the all-gather of unit 0.
    """
    units = [unit(0), unit(1), unit(2, sharded=False)]
    order = UnitOrder(units)
    order.set([0, 1, 2], [1, 0, 2])
    assert order.reductions == [2, 1, 0]
    order.begin(Phase.BACKWARD)
    order.reduces, order.on_device = True, on_device
    assert order.lags_behind(units[0]) is not on_device
    assert order.must_not_wait(units[0]) is on_device
    order.reduced = 1
    assert order.must_not_wait(units[0]) is False
