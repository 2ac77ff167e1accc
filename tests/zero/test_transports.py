"""Through memory or through messages, in pieces or copied together: gradients have the same bits."""

from __future__ import annotations

import os

import pytest

import shardwise.zero.passes.reduce
from shardwise.comm import neighbours
from tests.harness import run_ranks
from tests.models import CASES
from tests.zero.training import Outcome, Setting, assert_identical, ranks_agree, train_all

STAGES = [
    Setting(stage=stage, accumulation=accumulation, precision=precision, clip=0.5)
    for stage, accumulation, precision in (
        (0, 1, "fp32"),
        (1, 3, "bf16"),
        (2, 1, "bf16"),
        (2, 3, "fp32"),
        (3, 2, "fp32"),
    )
]


def train_through(transport: str, name: str, settings: list[Setting]) -> tuple[list[Outcome], int]:
    """Train with each setting; also return how many gradients were kept as autograd had made them."""
    kept = 0
    put = shardwise.zero.passes.reduce.Pieces.put

    def counting(*arguments):  # type: ignore[no-untyped-def]
        nonlocal kept
        kept += 1
        return put(*arguments)

    os.environ[neighbours.VARIABLE] = transport
    shardwise.zero.passes.reduce.Pieces.put = counting  # type: ignore[method-assign]
    try:
        return train_all(name, settings), kept
    finally:
        shardwise.zero.passes.reduce.Pieces.put = put  # type: ignore[method-assign]
        del os.environ[neighbours.VARIABLE]


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("form_")])
def test_both_give_the_same_bits(name: str) -> None:
    world = 3 if name == "gpt" else 2
    settings = [setting for setting in STAGES if setting.precision in CASES[name].precisions]
    found = {}
    for transport in ("memory", "messages"):
        outcomes, kept = zip(*run_ranks(train_through, world, transport, name, settings), strict=True)
        assert all(count > 0 if transport == "memory" else count == 0 for count in kept)
        found[transport] = ranks_agree(outcomes)
    for setting, memory, messages in zip(settings, found["memory"], found["messages"], strict=True):
        assert_identical(memory, messages, f"{name}, {setting}")


def test_what_changes_on_its_way_is_copied_together() -> None:
    """Scaled before it is sent, or sent in another dtype: a gradient does not travel as autograd has made it."""
    scaled = Setting(stage=2, extra=(("prescale_gradients", True),))
    narrowed = Setting(stage=2, extra=(("communication_data_type", "bf16"),))
    found = {}
    for transport in ("memory", "messages"):
        outcomes, kept = zip(*run_ranks(train_through, 2, transport, "gpt", [scaled, narrowed]), strict=True)
        assert kept == (0, 0)
        found[transport] = ranks_agree(outcomes)
    for memory, messages in zip(found["memory"], found["messages"], strict=True):
        assert_identical(memory, messages)


def train_with_few_addresses(most: int) -> tuple[list[Outcome], int]:
    before, neighbours.MOST_ADDRESSES = neighbours.MOST_ADDRESSES, most
    try:
        return train_through("memory", "gpt", [Setting(stage=2)])
    finally:
        neighbours.MOST_ADDRESSES = before


def test_more_gradients_than_one_offer_can_name_are_copied_together() -> None:
    (few, some), (many, all_) = (
        (ranks_agree([outcomes for outcomes, _ in found]), found[0][1])
        for found in (run_ranks(train_with_few_addresses, 2, most) for most in (4, neighbours.MOST_ADDRESSES))
    )
    assert 0 < some < all_  # units of at most four parameters, and all units
    assert_identical(few[0], many[0])
