"""Well-formed checkpoints that nobody has saved: values that could not have been written are refused."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise
from shardwise.checkpoint import directory, manifestfile
from shardwise.checkpoint import save as saving
from shardwise.checkpoint.listing import CheckpointDirectory
from shardwise.errors import CheckpointError
from tests.checkpoint import hostile
from tests.checkpoint.job import Run, as_ranks, config
from tests.harness import on_ranks
from tests.harness.logs import logged

Fields = dict[str, Any]


def tensor_of(fields: Fields, kind: str) -> Fields:
    return next(t for t in fields["tensors"] if t["kind"] == kind and t["name"] == "blocks.1.inner.weight")


def without_moment(fields: Fields) -> None:
    fields["tensors"].remove(tensor_of(fields, "optimizer/exp_avg_sq"))


def unknown_kind(fields: Fields) -> None:
    tensor_of(fields, "optimizer/exp_avg_sq")["kind"] = "optimizer/evil"


def place(fields: Fields) -> None:
    fields["loader"]["position"] = 10**15


REFUSED: dict[str, tuple[Callable[[Fields], None], str]] = {
    "schedule": (lambda f: f["scheduler"].update(last_batch_iteration=10**18), "'last_batch_iteration' 1000000000"),
    "place in the data": (place, "is beyond its 54 samples"),
    "missing moment": (without_moment, "optimizer state of 'blocks.1.inner.weight' lacks 'exp_avg_sq', and"),
    "unknown kind": (unknown_kind, "optimizer state of 'blocks.1.inner.weight' lacks 'exp_avg_sq', and"),
    "other schedule": (lambda f: f["layout"].update(scheduler="OneCycle"), "OneCycle, and this engine has WarmupLR"),
}


@as_ranks(1)
def test_what_could_not_have_been_written_is_refused(tmp_path: Path) -> None:
    run = Run(config(1), seed=1)
    run.step()
    run.engine.save_checkpoint(tmp_path, tag="a")
    path = tmp_path / "a" / "manifest.json"
    text = path.read_bytes()
    for name, (change, message) in REFUSED.items():
        fields = hostile.fields_of(text)
        change(fields)
        path.write_bytes(hostile.sealed(fields))
        with pytest.raises(CheckpointError) as caught:
            run.load(tmp_path, "a")
        assert message in str(caught.value), name
    path.write_bytes(text)
    run.load(tmp_path, "a")


@on_ranks(1)
def test_names_of_parameters_in_groups_stay_the_engines_own(tmp_path: Path) -> None:
    """Settings of a group with fewer parameters are loaded, as a rank with fewer experts has saved them."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.5)
    engine = shardwise.initialize(model=model, optimizer=optimizer, config={"train_micro_batch_size_per_gpu": 1})[0]
    engine.save_checkpoint(tmp_path, tag="a")
    path = tmp_path / "a" / "manifest.json"
    fields = hostile.fields_of(path.read_bytes())
    fields["optimizer"]["groups"][0].update(param_names=["other"], lr=0.25)
    path.write_bytes(hostile.sealed(fields))
    engine.load_checkpoint(tmp_path, tag="a")
    (group,) = engine.optimizer.param_groups
    engine.destroy()
    assert group["lr"] == 0.25 and list(group["param_names"]) == ["weight", "bias"]


def test_a_huge_manifest_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with open(tmp_path / "a" / "manifest.json", "wb") as file:
        file.truncate(64 << 30)
    with pytest.raises(CheckpointError, match=r"it has 68719476736 bytes, and at most 2147483648 are read"):
        manifestfile.load(str(tmp_path / "a"))


@as_ranks(1)
def test_another_job_in_the_same_directory_is_said_once(tmp_path: Path) -> None:
    engine, own = Run(config(1), seed=1).engine, saving._JOB
    with logged() as told, pytest.MonkeyPatch.context() as patch:
        for number in range(6):  # as if by another job every second time
            patch.setattr(saving, "_JOB", "0123abcd" if number % 2 else own)
            engine.save_checkpoint(tmp_path, tag=f"t{number % 2}")
    assert sum("another job saves here, too" in line for line in told.lines) == 1
    assert CheckpointDirectory(str(tmp_path)).head_of_latest().job == "0123abcd"


def test_two_jobs_may_save_into_one_directory(tmp_path: Path) -> None:
    def job(name: str) -> None:
        for number in range(100):
            draft = directory.StagingDirectory(str(tmp_path), f"{name}{number % 3}")
            directory.write_file(os.path.join(draft.path, "manifest.json"), b"{}")
            draft.publish()
            CheckpointDirectory(str(tmp_path)).set_latest(f"{name}{number % 3}")

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # one job often runs between two system calls of the other
    try:
        with ThreadPoolExecutor(2) as pool:
            for done in [pool.submit(job, name) for name in ("a", "b")]:
                done.result()
    finally:
        sys.setswitchinterval(interval)
    assert sorted(os.listdir(tmp_path)) == ["a0", "a1", "a2", "b0", "b1", "b2", "latest"]
