"""Memory plans that are made without ranks, against what ranks of this machine measure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import shardwise
from shardwise.engine.plans import plan_model
from shardwise.parallel import split
from tests.harness import on_ranks
from tests.harness.training import ADAMW, least_peaks
from tests.memory.test_report import GPT, LENGTH, ROWS, VOCABULARY
from tests.parallel.models import data, llama


@dataclass(frozen=True)
class Case:
    """What is trained on two ranks; `stage` of ZeRO, `keys` of the configuration."""

    stage: int
    model: Callable[[], nn.Module] = GPT
    batch: Callable[[], Any] = lambda: torch.randint(VOCABULARY, (ROWS, LENGTH))
    optimizer: Any = None
    keys: dict[str, Any] = field(default_factory=dict)

    def config(self) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": ROWS,
            "zero_optimization": {"stage": self.stage},
            **({} if self.optimizer else {"optimizer": ADAMW}),
            **self.keys,
        }


def sequences() -> dict[str, torch.Tensor]:
    batch = split(data(0, 1, length=32))
    return {**batch, "labels": batch["shift_labels"]}


CASES = {
    "gradients through shared memory": Case(1),
    "optimizer of the script": Case(2, optimizer=lambda p: torch.optim.RMSprop(p, lr=1e-3)),
    "shared sequences": Case(3, lambda: llama(shared=True), sequences, keys={"sequence_parallel_size": 2}),
}


@pytest.mark.parametrize("what", CASES)
@on_ranks(2)
def test_plans_without_ranks_are_the_measurements(what: str) -> None:
    case = CASES[what]
    engine, *_ = shardwise.initialize(model=case.model(), config=case.config(), optimizer=case.optimizer)
    batch = case.batch()

    def step() -> None:
        found = engine(**batch) if isinstance(batch, dict) else engine(batch)
        loss = found if isinstance(found, torch.Tensor) else found.loss
        del found
        engine.backward(loss)
        del loss
        engine.step()

    measured = least_peaks(engine.accountant, step)
    engine.destroy()
    given = {"batch": batch, "optimizer": case.optimizer, "local_ranks": 2}
    (plan,) = plan_model(case.model(), case.config(), ranks=2, stages=[case.stage], **given).plans
    assert not plan.note
    planned = {**plan.peaks, "total": plan.total}
    for name, size in measured.items():
        least = 0 if name == "total" else 1 << 14
        assert abs(planned[name] - size) <= 0.02 * max(size, least), (name, planned, measured)


def test_only_ranks_of_one_machine_share_memory() -> None:
    model, given = nn.Linear(256, 256), {"train_micro_batch_size_per_gpu": 1, "optimizer": ADAMW}
    plans = [plan_model(model, given, ranks=4, stages=[1], local_ranks=count).plans[0] for count in (4, None, 2)]
    near, alike, far = (plan.peaks["communication buffers"] for plan in plans)
    numel = sum(parameter.numel() for parameter in model.parameters())
    assert far == alike and far - near == 4 * (numel - numel // 4)  # a whole gradient, not a rank's part of it
