"""Plans of settings that the engine does not have: those that engines with these settings make themselves."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import shardwise
from shardwise.engine.plans import plan_model
from shardwise.errors import UsageError
from shardwise.plan.architectures import SHAPES, Decoder
from tests.harness import run_ranks, thorough
from tests.harness.training import ADAMW, engine_of
from tests.memory.test_report import GPT, LENGTH, VOCABULARY, settings


def both(
    stages: tuple[int, ...], precision: str, tied: bool, optimizer: str, accumulation: int, keep: int | None
) -> list[tuple[Any, Any]]:
    """Plans made beside an engine of stage 1, and by engines of some stages."""

    def make(stage: int) -> Any:
        torch.manual_seed(5)
        config = settings(stage, precision, optimizer, accumulation, keep)
        return shardwise.initialize(model=GPT(tied, layers=3), config=config)[0]

    batch = torch.randint(VOCABULARY, (4, LENGTH))
    engine = make(1)
    engine.backward(engine(batch))
    records = len(list(engine.ledger.records()))
    held = engine.accountant.live
    made = []
    if torch.distributed.get_rank() == 0:  # one rank alone
        made = list(engine.memory_plans(batch, stages=stages).plans)
    assert len(list(engine.ledger.records())) == records
    assert engine.accountant.live == held
    engine.step()
    engine.destroy()
    reports = []
    for stage in stages:
        engine = make(stage)
        reports.append(engine.memory_report(batch))
        engine.destroy()
    return list(zip(sorted(made, key=lambda plan: plan.setting.stage), reports, strict=False))


@pytest.mark.parametrize(
    ("stages", "asked"),
    [
        ((0, 3), ("fp32", True, "AdamW", 1, None)),
        thorough((0, 1, 2, 3), ("fp32", True, "AdamW", 1, None)),
        thorough((0, 1, 2, 3), ("bf16", False, "Adafactor", 3, 0)),
    ],
)
def test_plans_are_those_of_engines(stages: tuple[int, ...], asked: tuple[Any, ...]) -> None:
    found = run_ranks(both, 2, stages, *asked)[0]
    assert len(found) == len(stages)
    for plan, report in found:
        assert plan.total == report.total.planned, plan.setting
        assert plan.peaks == {row.name: row.planned for row in report.rows}, plan.setting
        assert plan.fits


def test_other_micro_batches_and_more_ranks() -> None:
    model = nn.Sequential(nn.Linear(32, 512), nn.GELU(), nn.Linear(512, 32))
    engine = engine_of(model, 0, ADAMW, train_micro_batch_size_per_gpu=64, gradient_accumulation_steps=2)
    x = torch.ones(64, 32)
    plans = engine.memory_plans(x, stages=[0, 3], micro_batches=[64, 8], ranks=[1, 2])
    assert len(plans.plans) == 8 and plans.room is not None
    by = {(p.setting.stage, p.setting.micro_batch, p.setting.ranks): p for p in plans.plans}
    assert by[0, 64, 1].total == engine.memory_report(x).total.planned
    large, small = by[0, 64, 1].peaks["activations"], by[0, 8, 1].peaks["activations"]
    weights = 32 * 512 * 4
    assert abs((large - weights) / (small - weights) - 8) <= 1  # the rest is the gradient of the largest weight
    assert by[0, 8, 1].setting.accumulation == 16
    (grown,) = engine.memory_plans(x, stages=[0], micro_batches=[128]).plans
    assert abs((grown.peaks["activations"] - weights) / (large - weights) - 2) <= 0.05
    assert by[3, 8, 2].peaks["optimizer state"] <= 0.51 * by[0, 8, 2].peaks["optimizer state"]
    text = plans.render()
    assert "64 x 2" in text and "yes" in text and "room for" in text
    assert plans.as_dict()["plans"][0]["setting"]["ranks"] == 1 and plans.cheapest is plans.plans[0]
    with pytest.raises(UsageError, match="micro-batch 64 on 4 ranks does not divide the global batch of 128"):
        engine.memory_plans(x, micro_batches=[64], ranks=[4])
    without = engine.memory_plans(stages=[0])
    assert "activations" not in without.plans[0].peaks and any("sample batch" in note for note in without.notes)
    engine.destroy()
    with pytest.raises(UsageError, match="destroyed"):
        engine.memory_plans(x)


@pytest.mark.thorough
def test_seventy_billion_parameters_on_a_thousand_ranks() -> None:
    with torch.device("meta"):
        model = Decoder(SHAPES["llama-70b"])
    numel = sum(parameter.numel() for parameter in model.parameters())
    assert 68.9e9 < numel < 69.1e9
    adam = {"type": "AdamW", "params": {"lr": 1e-4}}
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "optimizer": adam}
    (plan,) = plan_model(model, config, ranks=1024, stages=[3]).plans
    for category, size in {"parameters": 2, "gradients": 4, "master weights": 4, "optimizer state": 8}.items():
        assert plan.peaks[category] == pytest.approx(size * numel / 1024, rel=0.001)
    layer = sum(parameter.numel() for parameter in model.layers[0].parameters())
    assert plan.peaks["gathered window"] < 2 * 2 * layer  # layers of this size are several units
    assert plan.total is not None and plan.total < 5e9


def test_a_model_that_cannot_compute_without_values_is_planned_without_activations() -> None:
    class Branching(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (2 if bool(x.sum() > 0) else 3)

    engine = engine_of(Branching(8, 8), 0, ADAMW)
    plan = engine.memory_plans(torch.ones(2, 8), stages=[0]).plans[0]
    assert plan.total == engine.memory_report().total.planned
    assert plan.fits is None and plan.note.startswith("activations not planned: on a batch of ")
    engine.destroy()


def test_a_plan_takes_no_steps_of_the_training(caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_of(nn.Linear(8, 8), 0, ADAMW, steps_per_print=1)
    with caplog.at_level(logging.INFO, "shardwise"):
        assert engine.memory_plans(torch.ones(2, 8), stages=[0]).plans[0].total
        assert "step=" not in caplog.text and engine.global_steps == 0
        engine.backward(engine(torch.ones(2, 8)).sum())
        engine.step()
        assert "step=1" in caplog.text
    engine.destroy()
