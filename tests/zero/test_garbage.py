"""No reference cycle keeps a tensor: memory is freed with its last reader, not when Python collects garbage."""

from __future__ import annotations

import contextlib
import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwise.parallel.tensor.copies import map_inputs
from shardwise.trees import map_tensors
from tests.harness import on_ranks
from tests.harness.garbage import tensors_in_cycles
from tests.harness.training import Setting, start
from tests.models import CASES

SETTINGS = [(3, "bf16", "Adafactor"), (3, "fp16", "AdamW"), (2, "bf16", "Adafactor"), (1, "fp32", "AdamW")]


@pytest.mark.parametrize(("stage", "precision", "optimizer"), SETTINGS)
@on_ranks(2)
def test_a_step_leaves_no_tensor_in_a_cycle(stage: int, precision: str, optimizer: str) -> None:
    """Return the tensors in reference cycles that the third step has left."""
    case = CASES["gpt"]
    engine = start(case, Setting(stage, precision=precision, optimizer=optimizer, accumulation=2, lr=1e-3))
    rank = torch.distributed.get_rank()
    for step in range(3):
        with tensors_in_cycles() if step == 2 else contextlib.nullcontext() as found:
            for micro in range(2):
                engine.backward(case.loss(engine, case.data(step, micro, rank, torch.float32)))
                engine.step()
    assert found == []


@pytest.mark.parametrize("function", [map_tensors, map_inputs])
def test_mapped_inputs_are_freed(function: Any) -> None:
    tensor = torch.zeros(3)
    reference = weakref.ref(tensor)
    gc.disable()
    try:
        made = function(([SimpleNamespace(x=tensor)], {"y": tensor}), lambda value: value + 1)
        assert made[0][0].x.tolist() == [1.0] * 3
        del tensor, made
        assert reference() is None
    finally:
        gc.enable()
