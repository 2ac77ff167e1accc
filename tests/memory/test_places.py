"""Loans: what is lent when, what is stored, and what is counted."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from shardwise.memory import Accountant, Category, Tier
from shardwise.memory.places import ON_DEVICE, ON_HOST, Loans, Stored, borrowed, in_turn

M = Category.MASTER


class Shelf:
    """A place that writes down what it is asked for."""

    tier = Tier.DISK
    lends = True
    at_hand = False
    lags = False
    used_on = None

    def __init__(self) -> None:
        self.said: list[str] = []

    def keep(self, tensor: torch.Tensor) -> Stored:
        return Kept(self, tensor)


class Kept:
    staged = held = 0

    def __init__(self, shelf: Shelf, tensor: torch.Tensor) -> None:
        self._shelf = shelf
        self._tensor = tensor
        self._name = str(int(tensor[0]))
        self._values = tensor.clone()

    def start(self, *, read: bool) -> None:
        self._shelf.said.append(f"start {self._name}")
        self._tensor.copy_(self._values if read else torch.full_like(self._tensor, torch.nan))

    def finish(self) -> None:
        self._shelf.said.append(f"finish {self._name}")

    def give_back(self, *, written: bool) -> None:
        self._shelf.said.append(f"{'store' if written else 'drop'} {self._name}")
        if written:
            self._values.copy_(self._tensor)
        self._tensor.fill_(torch.nan)

    def settle(self) -> None:
        pass

    def look_ahead(self, target: torch.Tensor | None = None) -> None:
        pass

    def copy_to(self, target: torch.Tensor) -> None:
        target.copy_(self._values)


def three() -> tuple[Shelf, Accountant, list[Loans]]:
    shelf, accountant = Shelf(), Accountant()
    loans = [Loans(shelf, accountant) for _ in range(3)]
    for number, one in enumerate(loans):
        one.keep(M, torch.full((4,), float(number)))
    assert shelf.said == ["store 0", "store 1", "store 2"]
    shelf.said.clear()
    accountant.reset_peak()
    return shelf, accountant, loans


def test_the_next_is_on_its_way_while_one_is_used() -> None:
    shelf, accountant, loans = three()
    in_turn([(n, [(one, n > 0)]) for n, one in enumerate(loans)], lambda n: shelf.said.append(f"use {n}"))
    assert shelf.said == [
        "start 0", "start 1", "finish 0", "use 0", "drop 0",
        "start 2", "finish 1", "use 1", "store 1",
        "finish 2", "use 2", "store 2",
    ]  # fmt: skip
    assert accountant.peak[M] == 2 * 16 and accountant.live[M] == 0
    assert accountant.live_in(Tier.DISK)[M] == 3 * 16


def test_what_fails_gives_back_what_was_on_its_way() -> None:
    shelf, accountant, loans = three()

    def fail(number: int) -> None:
        raise ValueError

    with pytest.raises(ValueError):
        in_turn([(n, [(one, True)]) for n, one in enumerate(loans)], fail)
    assert shelf.said[-2:] == ["store 0", "drop 1"]
    assert [one.lent for one in loans] == [0, 0, 0] and accountant.live[M] == 0


def test_what_comes_before_the_one_that_fails_is_given_back() -> None:
    shelf, accountant = Shelf(), Accountant()
    loans = Loans(shelf, accountant)
    for number in range(3):
        loans.keep(M, torch.full((4,), float(number)))
    shelf.said.clear()
    moved = accountant.moved(Tier.DISK)
    second = list(loans._kept.values())[1].stored
    with mock.patch.object(second, "start", side_effect=MemoryError), pytest.raises(MemoryError):
        loans.start()
    assert shelf.said == ["start 0", "drop 1", "drop 0"]
    assert loans.lent == 0 and accountant.live[M] == 0 and accountant.live_in(Tier.DISK)[M] == 3 * 16
    assert accountant.moved(Tier.DISK).read == moved.read + 16


def test_a_loan_inside_of_another_brings_nothing_and_what_one_writes_is_stored() -> None:
    shelf, _, (loans, *_) = three()
    with borrowed([(loans, True)]), loans.lent_out(written=False):
        pass
    assert shelf.said == ["start 0", "finish 0", "finish 0", "store 0"]


def test_reading_and_what_is_kept_and_forgotten_in_a_loan() -> None:
    shelf, accountant = Shelf(), Accountant()
    loans = Loans(shelf, accountant)
    first, second = torch.full((4,), 1.0), torch.full((4,), 2.0)
    loans.keep(M, first)
    assert first.isnan().all() and loans.read(first).tolist() == [1.0] * 4
    with loans.lent_out(written=False):
        first.add_(6)
        loans.keep(M, second)
        loans.keep_only(M, [second])
        assert loans.read(first) is first
    assert shelf.said == ["store 1", "start 1", "finish 1", "store 2"]
    assert first.tolist() == [7.0] * 4 and second.isnan().all()  # who has it keeps its memory
    assert (accountant.live[M], accountant.live_in(Tier.DISK)[M]) == (0, 16)
    loans.clear()
    assert accountant.live_in(Tier.DISK)[M] == 0


def test_what_has_no_memory_of_its_own_and_what_is_on_the_device_stays_there() -> None:
    accountant = Accountant()
    rows = torch.zeros(2, 4)
    Loans(Shelf(), accountant).keep(M, rows[0])
    Loans(ON_HOST, accountant).keep(Category.MASTER, there := torch.ones(8))
    assert accountant.live_in(Tier.HOST)[Category.MASTER] == there.nbytes
    Loans(ON_DEVICE, accountant).keep(Category.OPTIMIZER, values := torch.ones(4))
    assert values.sum() == 4 and not rows.isnan().any()
    assert (accountant.live[M], accountant.live[Category.OPTIMIZER]) == (32, 16)
