"""Checkpoints that an earlier version wrote (`tests/checkpoint/fixtures`) still load, with the values that were saved.

Beside each are `values.safetensors`, all weights and optimizer state gathered from the engine that saved, and
`facts.json`, its counters and the losses of the next two steps. `python -m tests.checkpoint.test_fixtures DIRECTORY`
writes such fixtures with the version at hand; those in the repository are kept as they are.
"""

from __future__ import annotations

import datetime
import json
import math
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardwise.checkpoint import Checkpoint, verify
from tests.checkpoint import job, stages
from tests.harness import run_ranks, thorough

ROOT = Path(__file__).parent / "fixtures"
CLIENT = {
    "epoch": 3,
    "best": math.inf,
    "shape": (2, 3),
    "table": torch.arange(12.0, dtype=torch.float64).view(3, 4),
    "when": datetime.datetime(2026, 11, 27, 4, 5, tzinfo=datetime.timezone.utc),
}


class Piece(NamedTuple):
    """A range of a logical tensor on one rank: key of the gathered tensor, its shape, first element, values."""

    key: str
    shape: tuple[int, ...]
    start: int
    values: torch.Tensor


class Sample(NamedTuple):
    """What a rank has: pieces, counters, losses of further steps, client state."""

    pieces: list[Piece]
    counters: list[int]
    losses: list[float]
    client: Any = None


def _held(engine: Any) -> list[Piece]:
    sharded, found = engine.sharded, []
    for index, runs in sharded.state.value_runs().items():
        tensor = sharded.registry[index]
        found += [Piece(f"parameter/{tensor.name}", tensor.global_shape, start, v.clone()) for start, _, v in runs]
        for key in sharded.update.state(index) if runs and tensor.trainable else ():
            pieces = sharded.update.state_pieces(index, key)
            name = f"optimizer/{key}/{tensor.name}"
            found += [Piece(name, tensor.global_shape, start, view.clone()) for start, _, view in pieces]
    return found


def _counters(engine: Any) -> list[int]:
    return [engine.global_steps, engine.micro_steps, engine.skipped_steps, engine.global_samples]


def _of_job(path: str, stage: int, dtype: str, seed: int) -> Sample:
    run = job.Run(job.config(stage, dtype), seed=seed)
    client = None
    if seed == 1:
        run.step(), run.step()
        run.engine.save_checkpoint(path, tag="a", client_state=CLIENT)
    else:
        _, client = run.load(path)
    held, counters = _held(run.engine), _counters(run.engine)
    return Sample(held, counters, [run.step(), run.step()], client)


def _of_stages(path: str, layout: stages.Stages, seed: int) -> Sample:
    engine, client = stages.start(layout, seed), None
    if seed == 1:
        stages.train(engine, 0, 2)
        engine.save_checkpoint(path, tag="a", client_state=CLIENT)
    else:
        _, client = engine.load_checkpoint(path)
    held, counters = _held(engine), _counters(engine)
    sample = Sample(held, counters, stages.train(engine, 2, 2), client)
    engine.destroy()
    return sample


def _gathered(samples: list[Sample]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for piece in [piece for sample in samples for piece in sample.pieces]:
        whole = found.setdefault(piece.key, torch.full((math.prod(piece.shape),), math.nan, dtype=piece.values.dtype))
        whole[piece.start : piece.start + piece.values.numel()] = piece.values
    return found


def _samples(name: str, path: str, world: int, seed: int) -> list[Sample]:
    if name == "pipeline":
        return run_ranks(_of_stages, world, path, stages.Stages(1, world, stages=world), seed)
    stage, dtype = (3, "fp32") if name == "stage3" else (1, "bf16")
    return job.on_ranks(_of_job, world, path, stage, dtype, seed)


@pytest.mark.parametrize("name", ["stage3", "stage1_bf16", "pipeline"])
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


@pytest.mark.parametrize("world", [2, thorough(1)])
@pytest.mark.parametrize("name", ["stage3", "stage1_bf16", "pipeline"])
def test_an_engine_goes_on_from_it(name: str, world: int) -> None:
    expected = load_file(ROOT / name / "values.safetensors")
    facts = json.loads((ROOT / name / "facts.json").read_text())
    samples = _samples(name, str(ROOT / name), world, seed=2)
    found = _gathered(samples)
    assert found.keys() == expected.keys()
    assert [key for key, values in found.items() if not torch.equal(values, expected[key])] == []
    assert samples[0].client["epoch"] == 3
    assert samples[0].counters[0] == facts["counters"][0] == 2
    if world == 2:
        assert [sample.counters for sample in samples] == [facts["counters"]] * 2
        assert [sample.losses for sample in samples] == [pytest.approx(losses, rel=1e-3) for losses in facts["losses"]]


def write(root: Path) -> None:
    """Write all fixtures with this version."""
    for name in ("stage3", "stage1_bf16", "pipeline"):
        samples = _samples(name, str(root / name), 2, seed=1)
        save_file(_gathered(samples), root / name / "values.safetensors")
        facts = {"counters": samples[0].counters, "losses": [sample.losses for sample in samples]}
        (root / name / "facts.json").write_text(json.dumps(facts) + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
