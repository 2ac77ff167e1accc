"""What each stage holds and sends, against the arithmetic of the table (Rajbhandari et al., 2020).

With P padded elements on N ranks: stage 1 divides optimizer state and masters by N, stage 2 gradients, stage 3
parameters. A rank sends (N - 1) / N of what it gathers or reduces.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.memory import Category
from tests.harness import on_ranks, run_ranks, thorough
from tests.harness.training import DTYPES, SGD, Setting, each, engine_of, start, take_steps
from tests.models import CASES


def sections(engine: Any) -> list[tuple[int, str, int, int, bool]]:
    """(index of the unit, its name, padded elements, bytes of an element, trained) of every section."""
    return [
        (unit.index, unit.name, section.layout.numel, section.layout.dtype.itemsize, section.layout.trainable)
        for unit in engine.sharded.units
        for section in unit.sections
    ]


# -- memory ------------------------------------------------------------------------------------------------------------


def resident(name: str, setting: Setting) -> dict[str, Any]:
    engine = start(CASES[name], setting)
    take_steps(engine, CASES[name], range(2))
    engine.sharded.finish_gathers()
    segments = sum(len(group["params"]) for group in engine.optimizer.param_groups)
    result = {"sections": sections(engine), "live": dict(engine.accountant.live), "segments": segments}
    result["gradients"] = engine.accountant.peak[Category.GRADIENTS]
    memory = engine.job.transport == "memory"
    result["chunks"] = sum(chunk.nbytes for chunk in engine.job._backend.scratch((), False)) if memory else 0
    return result


@pytest.mark.parametrize(
    ("name", "world", "cap", "precisions"),
    [
        thorough("gpt", 2, None, ("bf16", "fp32", "fp32", "fp32")),
        ("frozen_half", 3, 50, ("fp32", "bf16", "bf16", "bf16")),
    ],
)
def test_resident_bytes_are_those_of_the_table(
    name: str, world: int, cap: int | None, precisions: tuple[str, ...]
) -> None:
    settings = [
        (name, Setting(stage, cap, precision=precision, optimizer="AdamW", lr=1e-3))
        for stage, precision in enumerate(precisions)
    ]
    for answer in run_ranks(each, world, resident, settings):
        for stage, (precision, found) in enumerate(zip(precisions, answer, strict=True)):
            check_resident(found, world, stage, 2 if precision == "bf16" else 4)


def check_resident(found: dict[str, Any], world: int, stage: int, size: int) -> None:
    assert {itemsize for *_, itemsize, _ in found["sections"]} == {size}
    whole = sum(numel for *_, numel, _, _ in found["sections"])
    trained = sum(numel for *_, numel, _, is_trained in found["sections"] if is_trained)
    live = found["live"]
    assert live[Category.PARAMETERS] == size * whole // (world if stage == 3 else 1)
    assert found["gradients"] == 4 * trained // (world if stage >= 1 else 1)
    # Between steps there are none, but for CPU ranks where nothing is sharded.
    assert live[Category.GRADIENTS] == (0 if stage >= 1 else found["gradients"])
    assert live[Category.MASTER] == (4 * trained // (world if stage >= 1 else 1) if size == 2 else 0)
    # Two moments, and one step count for each segment.
    assert live[Category.OPTIMIZER] == 8 * trained // (world if stage >= 1 else 1) + 4 * found["segments"]
    assert live[Category.GATHERED] == 0
    # What gradients are read into, chunk by chunk, is kept.
    assert live[Category.BUFFERS] == found["chunks"]
    assert found["chunks"] <= size * max(-(-numel // world) for *_, numel, _, _ in found["sections"])


# -- communication -----------------------------------------------------------------------------------------------------


def traffic(name: str, setting: Setting) -> dict[str, Any]:
    """Collectives and bytes of one window after the first, by (operation, unit or purpose)."""
    engine = start(CASES[name], setting)
    take_steps(engine, CASES[name], range(2))
    engine.sharded.finish_gathers()
    first = engine.ledger.sequence
    take_steps(engine, CASES[name], [2])
    engine.sharded.finish_gathers()
    records = list(engine.ledger.records(since=first))
    assert all(record.finished is not None for record in records)
    return {
        "sections": sections(engine),
        "calls": Counter((record.op, record.label) for record in records),
        "sent": Counter({op: sum(r.sent for r in records if r.op == op) for op in {r.op for r in records}}),
        "lines": {record.line.rsplit("/", 1)[-1].split(":")[0] for record in records},
        "first_back": engine.sharded.order[1][0],
    }


@pytest.mark.parametrize(
    ("name", "world", "cap", "ways"),
    [
        ("gpt", 2, None, ((1, "bf16"), (3, "bf16"), (3, "fp32"), (1, "fp32"))),
        ("frozen_half", 3, 50, ((2, "bf16"), (2, "fp32"), (1, "bf16"), (2, "bf16"))),
        thorough("frozen_half", 3, 50, ((3, "bf16"), (3, "fp32"), (1, "bf16"), (3, "bf16"))),
    ],
)
def test_collectives_and_bytes_of_a_step(
    name: str, world: int, cap: int | None, ways: tuple[tuple[int, str], ...]
) -> None:
    settings = [Setting(stage, cap, accumulation=n, precision=kind) for stage, (n, kind) in enumerate(ways)]
    answers = run_ranks(each, world, traffic, [(name, setting) for setting in settings])
    for setting, found, *others in zip(settings, *answers, strict=True):
        assert all(other["calls"] == found["calls"] for other in others)
        check_traffic(found, world, setting)


def check_traffic(found: dict[str, Any], world: int, setting: Setting) -> None:
    assert found["lines"] == {"test_costs.py", "models.py", "training.py"} & found["lines"] >= {"training.py"}
    stage, accumulation = setting.stage, setting.accumulation
    size = DTYPES[setting.precision].itemsize
    units = {index: unit for index, unit, *_ in found["sections"]}
    trained = {index: unit for index, unit, _, _, is_trained in found["sections"] if is_trained}
    whole = sum(numel for *_, numel, _, _ in found["sections"])
    updated = sum(numel for *_, numel, _, is_trained in found["sections"] if is_trained)
    # Sums over micro-batches travel in fp32; a gradient that is alone travels as it was computed.
    wire = 4 if stage <= 1 and accumulation > 1 else size
    reductions = accumulation if stage >= 2 else 1
    gathers = 2 * accumulation if stage == 3 else 1
    expected = Counter({("all_reduce", "gradient_norm"): 1})
    for unit in trained.values():
        expected["reduce_scatter", unit] += reductions
    for unit in (units if stage == 3 else trained).values():
        expected["all_gather", unit] += gathers
    if stage == 3:
        # The unit that the backward pass needs first waits for it since the forward pass.
        expected["all_gather", units[found["first_back"]]] -= accumulation
    assert found["calls"] == expected
    share = (world - 1) / world
    assert found["sent"]["reduce_scatter"] == reductions * updated * wire * share
    if stage == 3:
        waited = sum(numel for index, _, numel, _, _ in found["sections"] if index == found["first_back"])
        assert found["sent"]["all_gather"] == (gathers * whole - accumulation * waited) * size * share
    else:
        # Stage 0 gathers reduced gradients (fp32), the others updated parameters.
        assert found["sent"]["all_gather"] == updated * (4 if stage == 0 else size) * share
        # With the squares travel the sum of weights, numbers of passes (with one, without, with gradients), 3 reports.
        assert found["sent"]["all_reduce"] == (1 + 7) * 8 * (world - 1)


@on_ranks(2)
def test_the_order_of_units_is_agreed_once() -> None:
    """What happens once: values of rank 0 for all at the start, the agreed order of units after the first step."""
    engine = start(CASES["gpt"], Setting(stage=3))
    assert not {record.op for record in engine.ledger.records()} & {"all_gather", "reduce_scatter"}
    take_steps(engine, CASES["gpt"], [0])
    labels = {record.label for record in engine.ledger.records() if record.op == "broadcast"}
    # Secrets of the watchdog and of the side channel, shared by initialize.
    others = {label for label in labels if not label.endswith(".initial")}  # of parameters
    assert others == {"side_channel.key", "stall_limit", "unit_order"}


@pytest.mark.parametrize("prefetch", [True, False])
@on_ranks(2)
def test_no_more_than_two_consecutive_units_and_the_tied_one_are_gathered(prefetch: bool) -> None:
    engine = start(CASES["gpt"], Setting(stage=3, prefetch=prefetch))
    take_steps(engine, CASES["gpt"], range(2))
    engine.accountant.reset_peak()
    take_steps(engine, CASES["gpt"], [2])
    tied, *blocks = (unit.numel * 4 for unit in engine.sharded.units)  # in the order of execution
    peak = engine.accountant.peak[Category.GATHERED]
    assert peak <= tied + (max(a + b for a, b in pairwise(blocks)) if prefetch else max(blocks))
    assert peak < tied + sum(blocks)


class Repeating(nn.Module):
    """Runs its layers three times for evaluation; `read` is a layer whose memory it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.read: int | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(1 if torch.is_grad_enabled() else 3):
            for number, layer in enumerate(self.layers):
                x = layer(x)
                if number == self.read:
                    assert layer.weight.data.abs().sum() > 0
        return x


@on_ranks(2)
def test_what_one_pass_does_keeps_no_unit_in_later_ones() -> None:
    model = Repeating()
    engine = engine_of(model, 3, SGD, zero={"reduce_bucket_size": 72})
    peaks = []

    def step() -> None:
        engine.accountant.reset_peak()
        engine.backward(engine(torch.ones(2, 8)).square().sum())
        engine.step()
        peaks.append(engine.accountant.peak[Category.GATHERED])

    for _ in range(2):
        step()
    with torch.no_grad():
        engine(torch.ones(2, 8))
    step()
    model.read = 2
    step()
    model.read = None
    for _ in range(2):
        step()
    assert peaks[1] == peaks[2] == peaks[5] < peaks[3], (peaks, [unit.numel for unit in engine.sharded.units])
