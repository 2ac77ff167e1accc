"""Several micro-batches in flight: forward passes run ahead of the backward passes, as a pipeline schedule has them."""

from __future__ import annotations

import pytest
import torch

from tests.harness import run_ranks
from tests.harness.training import Setting, digest, parameters_digest, start
from tests.models import CASES

MICRO = 4
SCHEDULES = {
    "in turn": "f0 b0 f1 b1 f2 b2 f3 b3",
    "all forward": "f0 f1 f2 f3 b0 b1 b2 b3",
    "one forward one backward": "f0 f1 b0 f2 b1 f3 b2 b3",
}


def run(stage: int, schedule: str, precision: str, evaluates: bool) -> tuple[str, list[str], int]:
    """Train two steps; return fingerprints of parameters and losses, and the units that came too late."""
    case = CASES["gpt"]
    engine = start(case, Setting(stage, precision=precision, optimizer="AdamW", accumulation=MICRO, lr=1e-2))
    rank, losses = torch.distributed.get_rank(), []
    for step in range(2):
        flying = {}
        for action in SCHEDULES[schedule].split():
            kind, micro = action[0], int(action[1:])
            if kind == "f":
                flying[micro] = case.loss(engine, case.data(step, micro, rank, torch.float32))
                continue
            if evaluates:
                engine.eval()
                with torch.no_grad():
                    case.loss(engine, case.data(9, micro, rank, torch.float32))
                engine.train()
            loss = flying.pop(micro)
            engine.backward(loss)
            engine.step()
            losses.append(digest([loss.detach()]))
    found = parameters_digest(engine.module), losses, engine.sharded.unsharder.late
    engine.destroy()
    return found


@pytest.mark.parametrize(
    ("precision", "stage"),
    [("fp32", 2), ("bf16", 3)],
)
def test_the_schedule_changes_no_bit(stage: int, precision: str) -> None:
    expected = run_ranks(run, 2, stage, "in turn", precision, False)
    assert expected[0][0] == expected[1][0]
    for schedule in ("all forward", "one forward one backward"):
        for evaluates in (False, True):
            found = run_ranks(run, 2, stage, schedule, precision, evaluates)
            for mine, other in zip(found, expected, strict=True):
                assert mine[:2] == other[:2], (schedule, evaluates)
                assert mine[2] == 0, "a unit was copied from peers"
