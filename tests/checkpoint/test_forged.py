"""Well-formed checkpoints that nobody has saved: values that could not have been written are refused."""

from __future__ import annotations

import os
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
from shardwise.utils.logging import logger
from tests.checkpoint import hostile
from tests.checkpoint.job import Run, config, on_ranks
from tests.harness import run_ranks
from tests.harness.logs import Lines

Fields = dict[str, Any]


def tensor_of(fields: Fields, kind: str) -> Fields:
    return next(t for t in fields["tensors"] if t["kind"] == kind and t["name"] == "blocks.1.inner.weight")


def without_moment(fields: Fields) -> None:
    fields["tensors"].remove(tensor_of(fields, "optimizer/exp_avg_sq"))


def unknown_kind(fields: Fields) -> None:
    tensor_of(fields, "optimizer/exp_avg_sq")["kind"] = "optimizer/evil"


def setting(name: str, value: Any) -> Callable[[Fields], None]:
    return lambda fields: fields["optimizer"]["groups"][0].update({name: value})


def place(fields: Fields) -> None:
    for rank in fields["ranks"]:
        rank["loader"]["position"] = 10**15


REFUSED: dict[str, tuple[Callable[[Fields], None], str]] = {
    "schedule": (lambda f: f["scheduler"].update(last_batch_iteration=10**18), "'last_batch_iteration' 1000000000"),
    "place in the data": (place, "is beyond its 54 samples"),
    "missing moment": (without_moment, "optimizer state of 'blocks.1.inner.weight' lacks 'exp_avg_sq', and"),
    "unknown kind": (unknown_kind, "optimizer state of 'blocks.1.inner.weight' lacks 'exp_avg_sq', and"),
    "other schedule": (lambda f: f["layout"].update(scheduler="OneCycle"), "OneCycle, and this engine has WarmupLR"),
}


def forged(root: str) -> dict[str, str]:
    run = Run(config(1), seed=1)
    run.step()
    run.engine.save_checkpoint(root, tag="a")
    path = Path(root) / "a"
    text = (path / "manifest.json").read_bytes()
    found: dict[str, str] = {}
    handler = Lines()
    logger.addHandler(handler)
    for name, (change, _) in REFUSED.items():
        fields = hostile.fields_of(text)
        change(fields)
        (path / "manifest.json").write_bytes(hostile.sealed(fields))
        handler.lines.clear()
        try:
            run.load(root, "a")
            found[name] = " ".join(handler.lines)
        except CheckpointError as error:
            found[name] = f"refused: {error}"
    (path / "manifest.json").write_bytes(text)
    handler.lines.clear()
    run.load(root, "a")
    found["nothing"] = " ".join(handler.lines)
    logger.removeHandler(handler)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return on_ranks(forged, 1, str(tmp_path_factory.mktemp("forged")))[0]


@pytest.mark.parametrize("name", REFUSED)
def test_what_could_not_have_been_written_is_refused(name: str, found: dict[str, str]) -> None:
    assert found[name].startswith("refused: "), found[name]
    assert pytest.raises(AssertionError, match=REFUSED[name][1]).matches(AssertionError(found[name])), found[name]
    assert found["nothing"] == ""


def of_another_model(root: str) -> list[str]:
    """Load settings of a group with fewer parameters, as a rank with fewer experts has saved them."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.5)
    engine = shardwise.initialize(model=model, optimizer=optimizer, config={"train_micro_batch_size_per_gpu": 1})[0]
    engine.save_checkpoint(root, tag="a")
    path = Path(root) / "a" / "manifest.json"
    fields = hostile.fields_of(path.read_bytes())
    setting("param_names", ["other"])(fields)
    setting("lr", 0.25)(fields)
    path.write_bytes(hostile.sealed(fields))
    engine.load_checkpoint(root, tag="a")
    (group,) = engine.optimizer.param_groups
    engine.destroy()
    assert group["lr"] == 0.25
    return list(group["param_names"])


def test_names_of_parameters_in_groups_stay_the_engines_own(tmp_path: Path) -> None:
    assert run_ranks(of_another_model, 1, str(tmp_path)) == [["weight", "bias"]]


def test_a_huge_manifest_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with open(tmp_path / "a" / "manifest.json", "wb") as file:
        file.truncate(64 << 30)
    with pytest.raises(CheckpointError, match=r"it has 68719476736 bytes, and at most 2147483648 are read"):
        manifestfile.load(str(tmp_path / "a"))


def saves_by_turns(root: str) -> list[str]:
    """Save as if by another job every second time."""
    handler = Lines()
    logger.addHandler(handler)
    run = Run(config(1), seed=1)
    own = saving._JOB
    for number in range(6):
        saving._JOB = own if number % 2 == 0 else "0123abcd"
        run.engine.save_checkpoint(root, tag=f"t{number % 2}")
    saving._JOB = own
    logger.removeHandler(handler)
    return [line for line in handler.lines if "another job saves here, too" in line]


def test_another_job_in_the_same_directory_is_said_once(tmp_path: Path) -> None:
    told = on_ranks(saves_by_turns, 1, str(tmp_path))[0]
    assert len(told) == 1 and "it has made 't1'" in told[0]
    assert CheckpointDirectory(str(tmp_path)).head_of_latest().job == "0123abcd"


def test_two_jobs_may_save_into_one_directory(tmp_path: Path) -> None:
    def job(name: str) -> None:
        for number in range(60):
            draft = directory.StagingDirectory(str(tmp_path), f"{name}{number % 3}")
            directory.write_file(os.path.join(draft.path, "manifest.json"), b"{}")
            draft.publish()
            CheckpointDirectory(str(tmp_path)).set_latest(f"{name}{number % 3}")

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(job, name) for name in ("a", "b")]:
            done.result()
    assert sorted(os.listdir(tmp_path)) == ["a0", "a1", "a2", "b0", "b1", "b2", "latest"]
