"""State in the memory of the host: the same bits as on the device, and less there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwise.memory import Category, Tier
from tests.harness import run_ranks
from tests.memory import test_report as reports
from tests.models import CASES
from tests.zero.training import Setting, assert_identical, ranks_agree, start, train_all

OPTIMIZER = (("offload_optimizer", {"device": "cpu"}),)
PARAMETERS = (("offload_param", {"device": "cpu"}),)
PLACES = {"optimizer": OPTIMIZER, "parameters": PARAMETERS, "both": (*OPTIMIZER, *PARAMETERS)}


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_same_bits(world: int, precision: str, stage: int, accumulation: int) -> None:
    resident = Setting(stage, precision=precision, accumulation=accumulation, clip=0.5, optimizer="AdamW", lr=1e-2)
    places = PLACES if stage == 3 else {"optimizer": OPTIMIZER}
    settings = [resident, *(resident.with_stage(stage, zero=zero) for zero in places.values())]
    outcomes = ranks_agree(run_ranks(train_all, world, "gpt", settings))
    for name, outcome in zip(places, outcomes[1:], strict=True):
        assert_identical(outcome, outcomes[0], name)


def held(zero: Any) -> dict[Tier, dict[Category, int]]:
    case = CASES["gpt"]
    setting = Setting(3, precision="bf16", optimizer="AdamW", zero=zero)
    engine = start(case, setting)
    for step in range(2):
        engine.backward(case.loss(engine, case.data(step, 0, 0, torch.bfloat16)))
        engine.step()
    found = {tier: engine.accountant.live_in(tier) for tier in Tier}
    engine.destroy()
    assert not any(engine.accountant.live_in(Tier.HOST).values())
    return found


@pytest.mark.parametrize("place", PLACES)
def test_what_is_on_the_host_is_not_on_the_device(place: str) -> None:
    (resident,), (away,) = (run_ranks(held, 1, zero) for zero in ((), PLACES[place]))
    moved = {
        "optimizer": (Category.MASTER, Category.OPTIMIZER),
        "parameters": (Category.PARAMETERS,),
        "both": (Category.MASTER, Category.OPTIMIZER, Category.PARAMETERS),
    }[place]
    for category in moved:
        assert away[Tier.DEVICE][category] < 0.02 * resident[Tier.DEVICE][category] + 64, category
        assert away[Tier.HOST][category] >= 0.98 * resident[Tier.DEVICE][category], category


def reported(zero: Any, stage: int, accumulation: int) -> Any:
    before, after = reports.report(stage, "bf16", keep=0, accumulation=accumulation, zero=dict(zero))
    reports.check(before, after, f"stage {stage}")
    return before.elsewhere, after.elsewhere


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(("place", "stage"), [("optimizer", 1), ("optimizer", 3), ("parameters", 3), ("both", 3)])
def test_plans_are_the_measurements_in_each_tier(place: str, stage: int, accumulation: int) -> None:
    for before, after in run_ranks(reported, 2, PLACES[place], stage, accumulation):
        ((planned,), (measured,)) = before, after
        assert planned.name == measured.name == "host"
        assert reports.close(planned.planned, measured.measured)
