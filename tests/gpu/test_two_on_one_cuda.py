"""Two ranks on one CUDA device whose hosts do not wait for collectives (`staged.py`): losses, bits, and no hang."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from shardwise.trees import map_tensors
from tests.gpu import staged, standin
from tests.gpu.standin import needs_device
from tests.harness import run_ranks
from tests.harness.training import DTYPES, Setting, parameters_digest, start
from tests.models import CASES, Router

LIMIT_S = 30
"""A hang is a failed test."""

MANY = replace(CASES["router"], build=lambda: Router(experts=8))
ROUTES: dict[str, Callable[[int, int], list[int]]] = {
    # After a first step in which all ranks agree, rank 0 uses a unit once more that it has released.
    "once more": lambda step, rank: [*range(8), *([0, 3] if step and rank == 0 else [])],
    # The gradient of a unit is complete later on rank 1, which has used it long before its usual place.
    "later": lambda step, rank: [*([6] if step and rank == 1 else []), *range(8)],
    "each its own": lambda step, rank: [(step + rank + place) % 8 for place in range(5)],
}

Outcome = tuple[list[float], str]


def train(name: str, setting: Setting, where: Callable[[torch.Tensor], torch.Tensor], steps: int = 4) -> Outcome:
    case = MANY if name in ROUTES else CASES[name]
    engine, rank, losses = start(case, setting), dist.get_rank(), []
    for step in range(steps):
        for micro in range(setting.accumulation):
            batch = map_tensors(case.data(step, micro, rank, DTYPES[setting.precision]), where)
            if name in ROUTES:
                batch["route"] = ROUTES[name](step, rank)
            loss = case.loss(engine, batch)
            engine.backward(loss)
            engine.step()
        losses.append(loss.detach())
    found = [float(loss) for loss in losses], parameters_digest(engine.module)
    engine.destroy()
    return found


def on_the_device(name: str, setting: Setting, rehearse: bool) -> Outcome:
    with staged.staged(rehearse=rehearse):
        return train(name, setting, torch.Tensor.cuda)


def on_the_cpu(name: str, setting: Setting) -> Outcome:
    with mock.patch("shardwise.engine.build.choose_device", lambda *_: torch.device("cpu")):
        return train(name, setting, torch.Tensor.cpu)


def ready(rehearse: bool) -> None:
    """Begin with what takes long: the device's context, and first kernels."""
    if rehearse:
        standin.install()
    (torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")).sum().item()


def both(name: str, setting: Setting) -> list[Outcome]:
    run_ranks(ready, 2, standin.rehearsing(), timeout=60)
    return run_ranks(on_the_device, 2, name, setting, standin.rehearsing(), timeout=LIMIT_S)


@needs_device
def test_a_stream_waits_for_a_word_and_the_host_does_not() -> None:
    word, out = staged.Word(), torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        word.hold_up(3)
        out.fill_(1)
    time.sleep(0.05)
    word.set(2)
    time.sleep(0.05)
    assert not side.query()
    word.set(3)
    side.synchronize()
    assert float(out) == 1


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_stages_agree_with_each_other_and_with_the_cpu(precision: str) -> None:
    setting = Setting(clip=1.0, precision=precision, optimizer="AdamW", lr=1e-2)
    expected = run_ranks(on_the_cpu, 2, "gpt", setting)
    found = [both("gpt", setting.with_stage(stage)) for stage in (0, 1, 2, 3)]
    for outcomes in found:
        for (losses, digest), (on_cpu, _), (_, first) in zip(outcomes, expected, found[0], strict=True):
            assert losses == pytest.approx(on_cpu, rel=1e-4 if precision == "fp32" else 2e-2)
            assert digest == first
    assert found[0][0][1] == found[0][1][1]  # of all ranks


def test_accumulation() -> None:
    setting = Setting(clip=1.0, precision="bf16", optimizer="AdamW", lr=1e-2, accumulation=3)
    digests = [both("gpt", setting.with_stage(stage))[0][1] for stage in (0, 1, 2, 3)]
    assert digests[0] == digests[1] and digests[2] == digests[3]


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("name", ROUTES)
def test_ranks_that_take_different_branches_do_not_hang(name: str, stage: int) -> None:
    setting = Setting(stage, clip=1.0, optimizer="momentum", lr=1e-2)
    expected = run_ranks(on_the_cpu, 2, name, setting)
    for (losses, _), (on_cpu, _) in zip(both(name, setting), expected, strict=True):
        assert losses == pytest.approx(on_cpu, rel=1e-4)
