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
from tests.harness import on_ranks, thorough
from tests.harness.training import DTYPES, SGD, Setting, engine_of, start, take_steps
from tests.models import CASES


def size_of(units: Any, *, trained: bool = False) -> int:
    """Padded elements of units, or of their trained flat parameters."""
    return sum(s.layout.numel for unit in units for s in (unit.trainable if trained else unit.sections))


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "world", "cap", "precisions"),
    [
        thorough("gpt", 2, None, ("bf16", "fp32", "fp32", "fp32")),
        ("frozen_half", 3, 50, ("fp32", "bf16", "bf16", "bf16")),
    ],
)
@on_ranks("world")
def test_resident_bytes_are_those_of_the_table(
    name: str, world: int, cap: int | None, precisions: tuple[str, ...]
) -> None:
    for stage, precision in enumerate(precisions):
        size = DTYPES[precision].itemsize
        engine = start(CASES[name], Setting(stage, cap, precision=precision, optimizer="AdamW", lr=1e-3))
        take_steps(engine, CASES[name], range(2))
        engine.sharded.finish_gathers()
        live, units, divisor = engine.accountant.live, engine.sharded.units, world if stage >= 1 else 1
        whole, trained = size_of(units), size_of(units, trained=True)
        assert {section.layout.dtype.itemsize for unit in units for section in unit.sections} == {size}
        assert live[Category.PARAMETERS] == size * whole // (world if stage == 3 else 1)
        assert engine.accountant.peak[Category.GRADIENTS] == 4 * trained // divisor
        # Between steps there are none, but for CPU ranks where nothing is sharded.
        assert live[Category.GRADIENTS] == (0 if stage >= 1 else 4 * trained)
        assert live[Category.MASTER] == (4 * trained // divisor if size == 2 else 0)
        # Two moments, and one step count for each segment.
        segments = sum(len(group["params"]) for group in engine.optimizer.param_groups)
        assert live[Category.OPTIMIZER] == 8 * trained // divisor + 4 * segments
        assert live[Category.GATHERED] == 0
        # What gradients are read into, chunk by chunk, is kept.
        memory = engine.job.transport == "memory"
        chunks = sum(chunk.nbytes for chunk in engine.job._backend.scratch((), False)) if memory else 0
        assert (
            live[Category.BUFFERS]
            == chunks
            <= size * max(-(-s.layout.numel // world) for unit in units for s in unit.sections)
        )
        engine.destroy()


# -- communication -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "world", "cap", "ways"),
    [
        ("gpt", 2, None, ((1, "bf16"), (3, "bf16"), (3, "fp32"), (1, "fp32"))),
        ("frozen_half", 3, 50, ((2, "bf16"), (2, "fp32"), (1, "bf16"), (2, "bf16"))),
        thorough("frozen_half", 3, 50, ((3, "bf16"), (3, "fp32"), (1, "bf16"), (3, "bf16"))),
    ],
)
@on_ranks("world")
def test_collectives_and_bytes_of_a_step(
    name: str, world: int, cap: int | None, ways: tuple[tuple[int, str], ...]
) -> None:
    for stage, (accumulation, precision) in enumerate(ways):
        engine = start(CASES[name], Setting(stage, cap, accumulation=accumulation, precision=precision))
        take_steps(engine, CASES[name], range(2))
        engine.sharded.finish_gathers()
        first = engine.ledger.sequence
        take_steps(engine, CASES[name], [2])
        engine.sharded.finish_gathers()
        records = list(engine.ledger.records(since=first))
        assert all(record.finished is not None for record in records)
        lines = {record.line.rsplit("/", 1)[-1].split(":")[0] for record in records}
        assert {"training.py"} <= lines <= {"test_costs.py", "models.py", "training.py"}  # of the script
        sent = Counter[str]()
        for record in records:
            sent[record.op] += record.sent
        units, size, share = engine.sharded.units, DTYPES[precision].itemsize, (world - 1) / world
        updated = size_of(units, trained=True)
        # Sums over micro-batches travel in fp32; a gradient that is alone travels as it was computed.
        wire = 4 if stage <= 1 and accumulation > 1 else size
        reductions = accumulation if stage >= 2 else 1
        gathers = 2 * accumulation if stage == 3 else 1
        waits = units[engine.sharded.order[1][0]]
        expected = Counter({("all_reduce", "gradient_norm"): 1})
        for unit in units:
            if unit.trainable:
                expected["reduce_scatter", unit.name] += reductions
            if unit.trainable or stage == 3:
                expected["all_gather", unit.name] += gathers
        if stage == 3:
            # The unit that the backward pass needs first waits for it since the forward pass.
            expected["all_gather", waits.name] -= accumulation
        assert Counter((record.op, record.label) for record in records) == expected
        assert sent["reduce_scatter"] == reductions * updated * wire * share
        if stage == 3:
            assert sent["all_gather"] == (gathers * size_of(units) - accumulation * size_of([waits])) * size * share
        else:
            # Stage 0 gathers reduced gradients (fp32), the others updated parameters.
            assert sent["all_gather"] == updated * (4 if stage == 0 else size) * share
            # With the squares travel the sum of weights, numbers of passes (with one, without, with gradients), and
            # three reports.
            assert sent["all_reduce"] == (1 + 7) * 8 * (world - 1)
        engine.destroy()


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
