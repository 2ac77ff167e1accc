from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import nn

import shardwise
from shardwise.checkpoint import manifestfile
from shardwise.checkpoint.manifest import Manifest, Slice, StoredTensor
from shardwise.checkpoint.safetensors_reader import FileFacts
from shardwise.errors import CheckpointError

MANIFEST = Manifest(
    tag="a",
    created=1.5,
    versions={"shardwise": "9.9", "torch": "2", "python": "3"},
    layout={"world": 2, "stage": 3, "dtype": "bfloat16"},
    config={"zero_optimization": {"stage": 3}},
    files={"f": FileFacts(60, ("0a0b0c0d", "01234567"))},
    tensors=[
        StoredTensor("w", "parameter", (2, 3), "float32", (Slice("f", "k", 0, 6),), ("v",), True, 0, "bfloat16"),
        StoredTensor("w", "optimizer/m", (2, 3), "float32", (Slice("f", "l", 0, 6, ((0, 2), (0, 3))),)),
        StoredTensor("b", "buffer", (), "int64", (Slice("f", "b", 0, 1),), rank=1),
    ],
    counters={"global_steps": 3},
    ranks=[{"rng": None}],
)


def test_the_file_gives_the_manifest_back(tmp_path: Path) -> None:
    data = manifestfile.to_bytes(MANIFEST)
    (tmp_path / "manifest.json").write_bytes(data)
    assert manifestfile.load(str(tmp_path)) == MANIFEST
    plain = json.loads(data)
    assert plain["tensors"][0]["slices"] == [{"file": "f", "key": "k", "start": 0, "stop": 6, "box": None}]


def test_another_format_is_refused_with_the_version_that_wrote_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifestfile, "FORMAT", 3)
    data = manifestfile.to_bytes(MANIFEST)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"expected format shardwise.checkpoint 2.* found .* 3.*shardwise 9\.9"):
        manifestfile.from_bytes(data, "m.json")


def test_absent_manifests_are_explained(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such checkpoint directory"):
        manifestfile.load(str(tmp_path / "x"))
    with pytest.raises(CheckpointError, match="incomplete"):
        manifestfile.load(str(tmp_path))
    (tmp_path / "mp_rank_00_model_states.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match="another library"):
        manifestfile.load(str(tmp_path))


def test_a_run_that_never_reports_is_saved(tmp_path: Path) -> None:
    # Accelerate says "never" by infinity, which JSON does not have.
    config = {
        "train_batch_size": 1,
        "steps_per_print": float("inf"),
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
    }
    engine = shardwise.initialize(model=nn.Linear(2, 2), config=config)[0]
    assert engine.save_checkpoint(str(tmp_path), tag="one")
    assert json.loads((tmp_path / "one" / "manifest.json").read_text())["config"]["steps_per_print"] is None
    engine.destroy()
