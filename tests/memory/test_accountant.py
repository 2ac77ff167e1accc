"""The accountant against a plain list of events, and claims that come late."""

from __future__ import annotations

import gc
import sys
import threading

import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.memory import Accountant, Category, Tier, track_activations

A, B = Category.ACTIVATIONS, Category.BUFFERS


@given(st.lists(st.tuples(st.sampled_from(list(Category)), st.integers(0, 100), st.booleans()), max_size=60))
def test_live_and_peaks_are_those_of_the_events(events: list[tuple[Category, int, bool]]) -> None:
    accountant = Accountant()
    live = dict.fromkeys(Category, 0)
    peak = dict(live)
    totals = [0]
    for number, (category, size, ask) in enumerate(events):
        if size > live[category] or number % 3:
            accountant.add(category, size)
            live[category] += size
        else:
            accountant.remove(category, size)
            live[category] -= size
        peak[category] = max(peak[category], live[category])
        totals.append(sum(live.values()))
        if ask:  # reading must change nothing
            assert accountant.live == live
    assert accountant.live == live
    assert accountant.peak == peak
    assert (accountant.total, accountant.peak_total) == (totals[-1], max(totals))
    assert sum(accountant.at_peak.values()) == max(totals)


def test_threads_may_tell_at_once() -> None:
    """Chains of collectives go on in threads of their own, and tell of their buffers."""
    accountant, failures = Accountant(), []
    before = sys.getswitchinterval()

    def tell() -> None:
        try:
            for _ in range(20000):
                accountant.add(B, 7)
                accountant.remove(B, 7)
        except IndexError as error:
            failures.append(error)

    sys.setswitchinterval(1e-4)
    try:
        threads = [threading.Thread(target=tell) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not failures and accountant.live[B] == accountant.total == 0 and accountant.peak[B] <= 14


def test_long_logs_are_evaluated_without_being_asked() -> None:
    accountant = Accountant()
    for _ in range(3 * Accountant._LOG_LENGTH):
        accountant.add(A, 2)
        accountant.remove(A, 1)
    assert len(accountant._log) <= Accountant._LOG_LENGTH + 1
    assert accountant.total == 3 * Accountant._LOG_LENGTH


def test_a_tensor_counts_until_its_memory_is_given_back() -> None:
    accountant = Accountant()
    tensor = torch.zeros(100)
    view = tensor[:10]
    accountant.hold(B, tensor)
    accountant.hold(B, view)  # the same memory
    assert accountant.live[B] == 400
    del tensor
    assert accountant.live[B] == 400
    del view
    assert accountant.live[B] == 0
    assert accountant.peak[B] == 400


def test_memory_that_only_a_graph_holds_counts() -> None:
    accountant = Accountant()
    x = torch.ones(50, requires_grad=True)
    y = x.exp()
    accountant.hold(A, y)
    z = y.sum()
    del y
    assert accountant.live[A] == 200
    z.backward()
    assert accountant.live[A] == 0


def test_a_claim_holds_from_the_beginning() -> None:
    accountant = Accountant()
    with track_activations(accountant), accountant.owning(Category.OTHER):
        state = torch.zeros(100)
        temporary = torch.zeros(10)
        del temporary
        accountant.hold(Category.OPTIMIZER, state)
    assert accountant.peak[Category.OPTIMIZER] == 400
    assert accountant.peak[Category.OTHER] == 40
    assert accountant.peak[A] == 0
    assert accountant.peak_total == 440


def test_the_first_claim_wins_and_reading_in_between_keeps_the_sum() -> None:
    accountant = Accountant()
    with track_activations(accountant):
        tensor = torch.zeros(25)
        assert accountant.live[A] == 100
        accountant.hold(B, tensor)
        accountant.hold(Category.GRADIENTS, tensor)
        assert accountant.live[A] == 0
        assert accountant.live[B] == 100
        assert accountant.total == 100


def test_disregarded_memory_is_told_by_its_bytes_only() -> None:
    accountant = Accountant()
    with track_activations(accountant):
        buffer = torch.zeros(25)
        accountant.disregard(buffer)
        accountant.add(Category.GATHERED, 7)
    assert accountant.peak_total == 7
    del buffer
    assert accountant.total == 7


def test_reset_peak_begins_with_what_is_live() -> None:
    accountant = Accountant()
    accountant.add(A, 10)
    accountant.remove(A, 6)
    accountant.reset_peak()
    assert accountant.peak_total == accountant.peak[A] == 4
    assert not accountant.tracked


def test_cycles_are_counted_until_they_are_collected() -> None:
    accountant = Accountant()

    class Node:
        def __init__(self) -> None:
            self.tensor = torch.zeros(10)
            self.me = self

    node = Node()
    accountant.hold(A, node.tensor)
    del node
    gc.collect()
    assert accountant.live[A] == 0


def test_tiers_are_counted_apart() -> None:
    accountant = Accountant()
    accountant.add(A, 10)
    accountant.add(A, 50, Tier.HOST)
    accountant.remove(A, 20, Tier.HOST)
    assert (accountant.live[A], accountant.total, accountant.peak_total) == (10, 10, 10)
    assert accountant.live_in(Tier.HOST)[A] == 30
    assert [accountant.peak_total_in(tier) for tier in Tier] == [10, 50, 0]
    accountant.reset_peak()
    assert accountant.peak_total_in(Tier.HOST) == 30


def test_laps_leave_peaks_as_they_are() -> None:
    accountant = Accountant()
    accountant.add(Category.GATHERED, 100)
    accountant.remove(Category.GATHERED, 100)
    accountant.add(Category.BUFFERS, 30)
    first = accountant.lap()[Tier.DEVICE]
    assert (first.peak_total, first.total, first.at_peak[Category.GATHERED]) == (100, 30, 100)
    accountant.add(Category.BUFFERS, 20)
    accountant.add(Category.MASTER, 7, Tier.HOST)
    second = accountant.lap()
    assert (second[Tier.DEVICE].peak_total, second[Tier.DEVICE].peak[Category.GATHERED]) == (50, 0)
    assert second[Tier.HOST].peak_total == 7
    assert (accountant.peak_total, accountant.at_peak[Category.GATHERED], accountant.peak[Category.BUFFERS]) == (
        100,
        100,
        50,
    )
    accountant.add(Category.BUFFERS, 60)
    assert (accountant.peak_total, accountant.at_peak[Category.BUFFERS]) == (110, 110)
    accountant.reset_peak()
    assert accountant.peak_total == 110 and accountant.peak[Category.GATHERED] == 0
