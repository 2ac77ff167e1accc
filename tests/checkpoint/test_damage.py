"""Damaged, incomplete and strange checkpoints are found before anything is changed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise
from shardwise.errors import CheckpointError
from tests import harness
from tests.checkpoint.job import WIDTH, Run, as_ranks, config, differences, on_ranks
from tests.harness.logs import logged


def make(path: str, tags: tuple[str, ...]) -> None:
    run = Run(config(2, "bf16"), seed=1)
    for tag in tags:
        run.step()
        run.engine.save_checkpoint(path, tag=tag, client_state={"tag": tag, "values": torch.arange(5.0)})


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three checkpoints of one run, of one, two and three steps; `latest` names the third."""
    path = tmp_path_factory.mktemp("saved")
    on_ranks(make, 2, str(path), ("one", "two", "three"))
    return path


@pytest.fixture
def runs(saved: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoints that a test may damage."""
    return Path(shutil.copytree(saved, tmp_path / "runs"))


def flip(path: Path, place: int | None = None) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if place is None else place] ^= 16
    path.write_bytes(data)


def data_file(directory: Path) -> Path:
    return sorted(directory.glob("rank00001*"))[0]


def attempt(path: str, tag: str | None, trained: bool = True) -> dict[str, Any]:
    """Try to load, with or without optimizer state before; tell what came of it and whether the engine was changed."""
    run = Run(config(3, "bf16"), seed=2)
    if trained:
        run.step()
    before = run.fingerprint()
    loaded = error = None
    with logged() as told:
        try:
            loaded = run.load(path, tag)
        except CheckpointError as caught:
            error = str(caught)
    changed = bool(differences(before, run.fingerprint()))
    run.step()
    return {"loaded": loaded, "error": error, "changed": changed, "told": told.lines}


FAULTS = {
    "data": lambda runs: flip(data_file(runs / "three")),
    "manifest": lambda runs: flip(runs / "three" / "manifest.json"),
    "directory": lambda runs: shutil.rmtree(runs / "three"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_without_a_tag_the_newest_complete_one_is_loaded(runs: Path, fault: str) -> None:
    FAULTS[fault](runs)
    trained = fault == "data"
    for number, result in enumerate(on_ranks(attempt, 2, str(runs), None, trained)):
        path, client = result["loaded"]
        assert path == str(runs / "two") and client["tag"] == "two"
        assert any("three is skipped" in line for line in result["told"]) is (number == 0)
    for result in on_ranks(attempt, 2, str(runs), "three", trained):
        assert "three" in result["error"] and not result["changed"]


def test_a_damaged_latest_file_leads_to_the_newest_complete_one(runs: Path) -> None:
    (runs / "latest").write_bytes(b"")
    flip(runs / "two" / "manifest.json")
    for result in on_ranks(attempt, 2, str(runs), None):
        assert result["loaded"][0] == str(runs / "three")


class Other(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, WIDTH)
        self.extra = nn.Linear(WIDTH, WIDTH)


@pytest.mark.parametrize(
    ("optimizer", "groups", "expected"),
    [
        ("SGD", 2, "holds state of the optimizer AdamW, this engine has SGD"),
        ("AdamW", 1, "its optimizer has 2 parameter groups, this engine's has 1"),
        ("AdamW", 2, "has no optimizer state for trained parameters: extra.weight, extra.bias"),
    ],
)
@harness.on_ranks(2)
def test_another_optimizer_is_refused(saved: Path, optimizer: str, groups: int, expected: str) -> None:
    model = Other()
    parameters = list(model.parameters())
    engine, *_ = shardwise.initialize(
        model=model,
        model_parameters=[{"params": parameters[n::groups]} for n in range(groups)],
        config=config(2, "bf16", optimizer),
    )
    before = engine.module_state_dict()
    with pytest.raises(CheckpointError, match=f"{expected}.*load_optimizer_states=False"):
        engine.load_checkpoint(saved, "one", load_module_strict=False)
    assert all(torch.equal(before[name], value) for name, value in engine.module_state_dict().items())
    engine.destroy()


@as_ranks(2)
def test_a_schedule_that_would_begin_anew_is_an_error(tmp_path: Path) -> None:
    settings = config(1)
    del settings["scheduler"]
    Run(settings, seed=1).engine.save_checkpoint(tmp_path)
    target = Run(config(1), seed=2)
    before = target.fingerprint()
    with pytest.raises(CheckpointError, match="saved without a learning-rate scheduler"):
        target.load(tmp_path)
    assert differences(before, target.fingerprint()) == []
    assert target.load(tmp_path, load_lr_scheduler_states=False)[0] is not None
