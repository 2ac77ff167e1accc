"""No reference cycle keeps a tensor of a pipeline's step."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from tests.harness import on_ranks, thorough
from tests.harness.garbage import tensors_in_cycles
from tests.pipeline.training import Setting, data, engine_of


@pytest.mark.parametrize(
    ("schedule", "zero", "options"),
    [
        ("1f1b", 1, {}),
        ("zbv", 3, {}),
        *(thorough(name, zero, {}) for name in ("gpipe", "interleaved", "zb-h1", "dualpipe-v") for zero in (0, 2)),
        thorough("1f1b", 3, {"activation_checkpoint_interval": 1}),
        thorough("zb-h1", 1, {"activation_checkpoint_interval": 2}),
    ],
)
@on_ranks(2)
def test_a_step_leaves_no_tensor_in_a_cycle(schedule: str, zero: int, options: dict[str, Any]) -> None:
    """Received activations of all micro-batches stayed until the garbage collector ran."""
    setting = Setting(2, schedule, zero, options=options)
    engine = engine_of(setting)
    for step in range(3):
        batches: Any = list(data(setting, step))
        with tensors_in_cycles() if step == 2 else contextlib.nullcontext() as found:
            engine.train_batch(iter(batches))
            engine.eval_batch(iter(batches))
    engine.destroy()
    assert found == []
