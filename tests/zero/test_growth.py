"""The host work of a unit does not grow with the number of units; `test_costs` has collectives and bytes."""

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


def step(engine: Any) -> None:
    engine.backward(language_loss(engine, {"tokens": torch.randint(31, (2, 9))}))
    engine.step()
    engine.sharded.finish_gathers()


def work(layers: int, stage: int) -> Counter[str]:
    """Calls of the package's functions in one step after the first two."""
    engine = start(CASES["gpt"], Setting(stage=stage, optimizer="AdamW", lr=1e-3), GPT(layers=layers))
    assert len(engine.sharded.units) == layers + 2  # the tied embedding, and what lies outside of the blocks
    for _ in range(2):
        step(engine)
    calls: Counter[str] = Counter()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            calls[f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}"] += 1

    gc.collect()
    gc.disable()
    sys.setprofile(note)
    try:
        step(engine)
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


@pytest.mark.thorough
@pytest.mark.parametrize("stage", range(4))
def test_the_work_of_a_unit_is_the_same_in_a_deep_model(stage: int) -> None:
    found = {layers: run_ranks(work, 2, layers, stage)[0] for layers in (4, 24, 96)}

    def calls_of_a_unit(few: int, many: int) -> float:
        return (found[many].total() - found[few].total()) / (many - few)

    shallow, deep = calls_of_a_unit(4, 24), calls_of_a_unit(24, 96)
    # What has arrived already is not asked for again, so a few per cent depend on how fast the peer is. A single call
    # for every other unit would make the slope a quarter steeper.
    assert deep < 1.15 * shallow, (found[96] - found[24]).most_common(10)
