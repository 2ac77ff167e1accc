"""State in the memory of the host: the same bits as on the device, and less there.

The configuration refuses offloading so far; these engines have plans that ask for it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
import torch

from shardwise.memory import Category, Tier
from shardwise.memory.places import Where
from shardwise.zero.units.plan import Plan
from tests.harness import run_ranks
from tests.memory import test_report as reports
from tests.models import CASES
from tests.zero.training import Outcome, Setting, assert_identical, ranks_agree, start, train_all

PLACES = {
    "optimizer": Where("host", "host"),
    "parameters": Where(parameters="host"),
    "both": Where("host", "host", "host"),
}


def living(where: Where) -> AbstractContextManager[Any]:
    """Have engines keep state there."""
    return mock.patch.object(Plan, "of", functools.partial(Plan.of, where=where))


def train_at(name: str, setting: Setting, places: Sequence[Where]) -> list[Outcome]:
    found = []
    for where in places:
        with living(where):
            found += train_all(name, [setting])
    return found


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_same_bits(world: int, precision: str, stage: int, accumulation: int) -> None:
    resident = Setting(stage, precision=precision, accumulation=accumulation, clip=0.5, optimizer="AdamW", lr=1e-2)
    places = PLACES if stage == 3 else {"optimizer": PLACES["optimizer"]}
    outcomes = ranks_agree(run_ranks(train_at, world, "gpt", resident, [Where(), *places.values()]))
    for name, outcome in zip(places, outcomes[1:], strict=True):
        assert_identical(outcome, outcomes[0], name)


def held(where: Where) -> dict[Tier, dict[Category, int]]:
    case = CASES["gpt"]
    with living(where):
        engine = start(case, Setting(3, precision="bf16", optimizer="AdamW"))
    for step in range(2):
        engine.backward(case.loss(engine, case.data(step, 0, 0, torch.bfloat16)))
        engine.step()
    found = {tier: engine.accountant.live_in(tier) for tier in Tier}
    engine.destroy()
    assert not any(engine.accountant.live_in(Tier.HOST).values())
    return found


@pytest.mark.parametrize("place", PLACES)
def test_what_is_on_the_host_is_not_on_the_device(place: str) -> None:
    (resident,), (away,) = (run_ranks(held, 1, where) for where in (Where(), PLACES[place]))
    moved = {
        "optimizer": (Category.MASTER, Category.OPTIMIZER),
        "parameters": (Category.PARAMETERS,),
        "both": (Category.MASTER, Category.OPTIMIZER, Category.PARAMETERS),
    }[place]
    for category in moved:
        assert away[Tier.DEVICE][category] < 0.02 * resident[Tier.DEVICE][category] + 64, category
        assert away[Tier.HOST][category] >= 0.98 * resident[Tier.DEVICE][category], category


def reported(where: Where, stage: int, accumulation: int) -> Any:
    with living(where):
        before, after = reports.report(stage, "bf16", keep=0, accumulation=accumulation)
    reports.check(before, after, f"stage {stage}")
    return before.elsewhere, after.elsewhere


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(("place", "stage"), [("optimizer", 1), ("optimizer", 3), ("parameters", 3), ("both", 3)])
def test_plans_are_the_measurements_in_each_tier(place: str, stage: int, accumulation: int) -> None:
    for before, after in run_ranks(reported, 2, PLACES[place], stage, accumulation):
        ((planned,), (measured,)) = before, after
        assert planned.name == measured.name == "host"
        assert reports.close(planned.planned, measured.measured)
