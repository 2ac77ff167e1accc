"""Tensors that are put aside on the host."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from shardwise.memory import Accountant, Category, Tier
from shardwise.memory.stash import Stash
from tests.device.streams import Played

CPU = torch.device("cpu")


@pytest.mark.parametrize("pinned", [True, False])
def test_values_come_back_to_the_same_tensors_and_views(pinned: bool) -> None:
    accountant = Accountant()
    whole, other = torch.randn(10, 3), torch.arange(7, dtype=torch.int64)
    view, before, numbers = whole[2:5], whole.clone(), other.clone()
    for tensor in (whole, other):
        accountant.hold(Category.OPTIMIZER, tensor)
    stash = Stash(CPU, accountant, pinned=pinned)
    for tensor in (view, whole, other, torch.empty(0)):
        stash.put(tensor)
    assert stash.has(whole) and not whole.untyped_storage().nbytes() and not other.untyped_storage().nbytes()
    size = before.nbytes + numbers.nbytes
    assert accountant.live[Category.OPTIMIZER] == 0 and accountant.live_in(Tier.HOST)[Category.OPTIMIZER] == size
    stash.bring()
    stash.bring()
    assert not stash.has(whole) and torch.equal(whole, before) and torch.equal(other, numbers)
    assert view.data_ptr() == whole[2:5].data_ptr()
    assert accountant.live[Category.OPTIMIZER] == size and not any(accountant.live_in(Tier.HOST).values())
    del whole, view, other, tensor
    assert accountant.total == 0


def test_bytes_that_are_told_by_their_number() -> None:
    accountant, gradient = Accountant(), torch.zeros(100)
    accountant.disregard(gradient)
    accountant.add(Category.GRADIENTS, gradient.nbytes)
    stash = Stash(CPU, accountant)
    stash.put(gradient, Category.GRADIENTS)
    assert accountant.total == 0 and accountant.live_in(Tier.HOST)[Category.GRADIENTS] == 400
    stash.bring()
    assert accountant.total == 400 and not any(accountant.live_in(Tier.HOST).values())


def test_copies_come_behind_what_was_launched_and_others_behind_them() -> None:
    stream = Played(late=False)
    with mock.patch("shardwise.memory.stash.copy_stream", lambda device: stream):
        stash, tensor = Stash(CPU, Accountant()), torch.arange(4)
        stash.put(tensor)
        assert stream.log == ["memory 32", "follow", "copy 32"]
        # The memory is kept from being used again until the copy has been made.
        assert [kept.untyped_storage()._cdata for kept in stream.kept] == [tensor.untyped_storage()._cdata]
        stash.synchronize()
        stash.bring()
        assert stream.log[3:] == ["host waits", "follow", "copy 32", "stream waits"]
        assert tensor.tolist() == [0, 1, 2, 3]
