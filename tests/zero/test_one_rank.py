"""A mesh of one rank: everything that ranks do is done, with oneself."""

from __future__ import annotations

import torch

from shardwise.memory import Category
from tests.harness import on_ranks
from tests.harness.training import Setting, gradients, start
from tests.models import CASES
from tests.zero.elsewhere import forced


@on_ranks(1)
def test_it_gathers_and_releases() -> None:
    """Between passes nothing is gathered, and gradients are where they are stepped."""
    with forced():
        engine = start(CASES["gpt"], Setting(3))
    seen = [unit.sharded for unit in engine.sharded.units]
    for step in range(2):
        engine.backward(CASES["gpt"].loss(engine, CASES["gpt"].data(step, 0, 0, torch.float32)))
        seen += [not section.full.numel() for unit in engine.sharded.units for section in unit.sections]
        assert gradients(engine.module)
        engine.step()
    engine.destroy()
    (*seen,) = seen
    assert len(seen) > 10 and all(seen)


@on_ranks(1)
def test_gradients_are_collected_where_they_stay() -> None:
    """Most bytes of gradients and of buffers in the passes of a step, and bytes of all gradients."""
    stage = 2
    with forced():
        engine = start(CASES["gpt"], Setting(stage))
    engine.backward(CASES["gpt"].loss(engine, CASES["gpt"].data(0, 0, 0, torch.float32)))
    peak = engine.accountant.peak
    held = sum(section.layout.numel * 4 for unit in engine.sharded.units for section in unit.trainable)
    engine.destroy()
    gradients = peak[Category.GRADIENTS]
    buffers = peak[Category.BUFFERS]
    assert gradients == held and not buffers
