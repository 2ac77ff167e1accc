"""Positions of all-gathers and reductions in a pass, from which follows which rank may wait for which."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.zero.passes.order import Phase, UnitOrder


def unit(index: int, *, sharded: bool = True, trained: bool = True, pins: int = 0) -> Any:
    return SimpleNamespace(index=index, sharded=sharded, trainable=[object()] if trained else [], pins=pins)


def backward(order: UnitOrder, *, on_device: bool, reduced: int = 0) -> UnitOrder:
    order.begin(Phase.BACKWARD)
    order.reduces, order.on_device, order.reduced = True, on_device, reduced
    return order


def test_orders_of_a_pass() -> None:
    units = [unit(0), unit(1, sharded=False), unit(2, trained=False), unit(3, pins=1)]
    order = UnitOrder(units)
    order.set([0, 1, 2, 3], [3, 1, 2, 0])
    assert [u.index for u in order.forward] == [0, 2, 3]
    assert [u.index for u in order.backward] == [3, 2, 0]
    assert order.reductions == [3, 1, 0]
    order.begin(Phase.FORWARD)
    assert [u.index for u in order.sequence] == [0, 2]
    assert order.following is units[0]
    order.advance_to(2)
    assert order.following is None


@pytest.mark.parametrize("on_device", [False, True])
def test_a_unit_that_is_not_sharded_launches_no_all_gather(on_device: bool) -> None:
    """The layers 0 and 1 run before and after unit 2, which is reduced first and launches nothing before that.

    A peer may therefore wait in that reduction without having launched the all-gather of unit 0.
    """
    units = [unit(0), unit(1), unit(2, sharded=False)]
    order = UnitOrder(units)
    order.set([0, 1, 2], [1, 0, 2])
    assert order.reductions == [2, 1, 0]
    backward(order, on_device=on_device)
    assert order.lags_behind(units[0]) is not on_device
    assert order.must_not_wait(units[0]) is on_device
    backward(order, on_device=on_device, reduced=1)
    assert order.must_not_wait(units[0]) is False


def test_a_rank_that_has_reduced_everything_lags_behind_only_in_lossy_reductions() -> None:
    units = [unit(0), unit(1), unit(2, trained=False)]
    order = UnitOrder(units)
    order.set([2, 1, 0], [0, 1, 2])
    assert order.reductions == [0, 1]
    backward(order, on_device=False, reduced=2)
    assert not order.lags_behind(units[2])
    order.lossy_in_flight = 1
    assert order.lags_behind(units[2])


def test_without_reductions_no_rank_waits_in_one() -> None:
    units = [unit(0), unit(1)]
    for on_device in (False, True):
        order = backward(UnitOrder(units), on_device=on_device)
        order.reduces = False
        assert not order.lags_behind(units[0])
        assert not order.must_not_wait(units[0])
