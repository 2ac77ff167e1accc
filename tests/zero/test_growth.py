"""What must not grow: the host work of a unit with the number of units, memory with steps of changing length."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise
from tests.harness import run_ranks
from tests.harness.training import Setting, start
from tests.models import CASES, GPT, language_loss

PACKAGE = str(Path(shardwise.__file__).parent)


def step(engine: Any, length: int = 9) -> None:
    engine.backward(language_loss(engine, {"tokens": torch.randint(31, (2, length))}))
    engine.step()
    engine.sharded.finish_gathers()


# -- with layers -------------------------------------------------------------------------------------------------------


def work(layers: int, stage: int) -> dict[str, Any]:
    """Units, collectives, bytes and calls of the package's functions in one step after the first two."""
    engine = start(CASES["gpt"], Setting(stage=stage, optimizer="AdamW", lr=1e-3), GPT(layers=layers))
    for _ in range(2):
        step(engine)
    calls: Counter[str] = Counter()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            calls[f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}"] += 1

    first = engine.ledger.sequence
    gc.collect()
    gc.disable()
    sys.setprofile(note)
    try:
        step(engine)
    finally:
        sys.setprofile(None)
        gc.enable()
    records = list(engine.ledger.records(since=first))
    return {
        "units": len(engine.sharded.units),
        "tensors": len(engine.sharded.registry),
        "elements": sum(section.layout.numel for unit in engine.sharded.units for section in unit.sections),
        # The unit that the backward pass needs first waits for it since the forward pass.
        "waits": sum(section.layout.numel for section in engine.sharded.units[engine.sharded.order[1][0]].sections),
        "counts": Counter(record.op for record in records),
        "sent": sum(record.sent for record in records),
        "calls": calls,
    }


@pytest.mark.thorough
@pytest.mark.parametrize("stage", range(4))
def test_the_work_of_a_unit_is_the_same_in_a_deep_model(stage: int) -> None:
    world = 2
    found = {layers: run_ranks(work, world, layers, stage)[0] for layers in (4, 24, 96)}
    for layers, one in found.items():
        assert one["units"] == layers + 2  # the tied embedding, and what lies outside of the blocks
        # One reduction a unit; gathers: both passes at stage 3, else updated parameters or reduced gradients.
        gathers, elements = one["units"], one["elements"]
        if stage == 3:
            gathers, elements = 2 * gathers - 1, 2 * elements - one["waits"]
        assert one["counts"] == {"reduce_scatter": one["units"], "all_gather": gathers, "all_reduce": 1}
        share = (world - 1) / world
        norm = 8 * 8 * (world - 1)  # eight numbers: squares, and facts about weights
        assert one["sent"] == (one["elements"] + elements) * 4 * share + norm

    def calls_of_a_unit(few: int, many: int) -> float:
        return (found[many]["calls"].total() - found[few]["calls"].total()) / (many - few)

    shallow, deep = calls_of_a_unit(4, 24), calls_of_a_unit(24, 96)
    # What has arrived already is not asked for again, so a few per cent depend on how fast the peer is. A single call
    # for every other unit would make the slope a quarter steeper.
    assert deep < 1.15 * shallow, (found[96]["calls"] - found[24]["calls"]).most_common(10)
