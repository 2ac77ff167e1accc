"""What a profiler's trace names."""

from __future__ import annotations

import torch

from tests.harness.training import Setting, train
from tests.models import CASES
from tests.zero.elsewhere import forced


def test_a_trace_names_gathers_reductions_and_steps_by_unit() -> None:
    with forced(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        train(CASES["gpt"], Setting(stage=3, optimizer="AdamW"), 2)
    names = {event.name for event in profile.events() if event.name.startswith("shardwise::")}
    assert "shardwise::step" in names
    for what in ("gather", "wait for gather", "reduce", "wait for reduction"):
        units = {name.removeprefix(f"shardwise::{what} ") for name in names if name.startswith(f"shardwise::{what} ")}
        assert len(units) > 2, (what, sorted(names))
