"""The accountant against a plain list of events, and claims that come late."""

from __future__ import annotations

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
