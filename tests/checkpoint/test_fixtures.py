"""Checkpoints that an earlier version wrote (`tests/checkpoint/fixtures`) still load, with the values that were saved.

Beside each are `values.safetensors`, all weights and optimizer state gathered from the engine that saved, and
`facts.json`, its counters and the losses of the next two steps.
"""

from __future__ import annotations

import datetime
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shardwise.checkpoint import Checkpoint, verify
from tests.checkpoint import matrix, stages
from tests.checkpoint.job import Layout, Run, config
from tests.harness import run_ranks, thorough

ROOT = Path(__file__).parent / "fixtures"
CLIENT = {
    "epoch": 3,
    "best": math.inf,
    "shape": (2, 3),
    "table": torch.arange(12.0, dtype=torch.float64).view(3, 4),
    "when": datetime.datetime(2026, 11, 27, 4, 5, tzinfo=datetime.timezone.utc),
}


NAMES = pytest.mark.parametrize("name", ["stage3", "stage1_bf16", "pipeline"])


@NAMES
def test_the_files_hold_what_was_saved(name: str) -> None:
    path, expected = str(ROOT / name / "a"), load_file(ROOT / name / "values.safetensors")
    verify(path)
    with Checkpoint(path) as saved:
        found = {f"{tensor.kind}/{tensor.name}": tensor for tensor in saved.manifest.tensors if tensor.kind != "buffer"}
        assert expected.keys() == {key for key, tensor in found.items() if tensor.numel}
        for key, values in expected.items():
            assert torch.equal(saved.read(found[key]).view(-1), values), key
        client = saved.decode(saved.manifest.client)
    assert torch.equal(client["table"], CLIENT["table"])
    assert {**client, "table": None} == {**CLIENT, "table": None}


def goes_on(name: str, world: int) -> tuple[list[str], list[int], list[float], Any]:
    """Load; return what is not as it was saved, the counters, the losses of further steps, and the client's state."""
    if name == "pipeline":
        engine = stages.start(Layout(1, world, stages=world), seed=2)
    else:
        run = Run(config(3) if name == "stage3" else config(1, "bf16"), seed=2)
        engine = run.engine
    _, client = engine.load_checkpoint(ROOT / name)
    wrong = matrix.unlike(engine, matrix.Content(str(ROOT / name)))
    counters = [engine.global_steps, engine.micro_steps, engine.skipped_steps, engine.global_samples]
    losses = stages.train(engine, 2, 2) if name == "pipeline" else [run.step(), run.step()]
    return wrong, counters, losses, client


@pytest.mark.parametrize("world", [2, thorough(1)])
@NAMES
def test_an_engine_goes_on_from_it(name: str, world: int) -> None:
    facts = json.loads((ROOT / name / "facts.json").read_text())
    for (wrong, counters, losses, client), expected in zip(
        run_ranks(goes_on, world, name, world), facts["losses"][:world], strict=True
    ):
        assert wrong == [] and client["epoch"] == 3
        assert counters[0] == facts["counters"][0] == 2
        if world == 2:
            assert counters == facts["counters"] and losses == pytest.approx(expected, rel=1e-3)
