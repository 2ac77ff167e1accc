"""Damaged, incomplete and strange checkpoints are found before anything is changed."""

from __future__ import annotations

import shutil
from pathlib import Path

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


@as_ranks(2)
def test_without_a_usable_latest_the_newest_complete_one_is_loaded_and_the_log_says_so(
    saved: Path, tmp_path: Path
) -> None:
    runs, first = tmp_path / "runs", torch.distributed.get_rank() == 0
    if first:
        shutil.copytree(saved, runs)
        (runs / "latest").write_bytes(b"")
        (file,) = (runs / "three").glob("rank00001*")
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    torch.distributed.barrier()
    run = Run(config(3, "bf16"), seed=2)
    with logged() as told:
        path, client = run.load(runs)
    assert path == str(runs / "two") and client["tag"] == "two"
    assert any("three is skipped" in line for line in told.lines) is first


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
