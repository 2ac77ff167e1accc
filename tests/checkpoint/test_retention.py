"""Retention: what is removed when a new checkpoint has been saved, and what never is."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.checkpoint import Checkpoint, Manifest, directory, manifestfile
from shardwise.checkpoint.checksums import FileFacts
from shardwise.checkpoint.listing import CheckpointDirectory
from tests.checkpoint.job import Run, config, on_ranks


def make(parent: Path, tag: str, steps: int, number: int, finite: bool = True, created: float = 0.0) -> None:
    """Put down a checkpoint with one small file."""
    path = parent / tag
    path.mkdir(parents=True)
    (path / "rank00000of00001-01234567.safetensors").write_bytes(b"data")
    facts = FileFacts(4, ("00000000",))
    layout: dict[str, Any] = {"sequence": number} if number else {}
    if not finite:
        layout["finite"] = False
    found = Manifest(tag, created, {}, layout, {}, {"rank00000of00001-01234567.safetensors": facts}, [])
    found.counters["global_steps"] = steps
    (path / "manifest.json").write_bytes(manifestfile.to_bytes(found))


def left(parent: Path) -> list[str]:
    return sorted(os.listdir(parent))


def numbers(parent: Path) -> list[int]:
    return sorted(int(name.removeprefix("global_step")) for name in os.listdir(parent) if name != "latest")


@given(
    order=st.permutations(range(0, 12)),
    count=st.integers(1, 12),
    keep_last=st.integers(1, 5),
    keep_every=st.none() | st.integers(1, 5),
    latest=st.integers(0, 11),
    data=st.data(),
)
def test_what_stays_is_the_newest_the_multiples_and_the_latest(
    order: list[int], count: int, keep_last: int, keep_every: int | None, latest: int, data: st.DataObject
) -> None:
    saved = order[:count]  # in this order: a run may have gone back
    damaged = data.draw(st.sets(st.sampled_from(saved[:-1]))) if count > 1 else set()
    with tempfile.TemporaryDirectory() as folder:
        parent = Path(folder)
        for age, steps in enumerate(saved):
            make(parent, f"global_step{steps}", steps, 100 + age, created=100.0 - age)
        for steps in damaged:
            next((parent / f"global_step{steps}").glob("*.safetensors")).write_bytes(b"")
        CheckpointDirectory(folder).set_latest(f"global_step{latest}")
        notes = CheckpointDirectory(folder).prune(
            f"global_step{saved[-1]}", {"global_steps": saved[-1]}, keep_last, keep_every
        )
        whole = [steps for steps in saved if steps not in damaged]
        expected = {
            steps
            for steps in saved
            if steps in whole[-keep_last:]
            or steps in damaged
            or steps == latest
            or (keep_every is not None and steps % keep_every == 0)
        }
        assert numbers(parent) == sorted(expected)
        assert len(notes) == (len(expected) < count)


def test_what_is_no_checkpoint_of_the_series_stays(tmp_path: Path) -> None:
    for steps in range(1, 6):
        make(tmp_path, f"step-{steps:03}", steps, steps)
    make(tmp_path, "best", 1, 1)
    make(tmp_path, "best-2", 2, 2)  # a series of its own
    make(tmp_path, "step-900", 1, 1)  # was named by hand: it is of step 1
    make(tmp_path, "copy", 2, 1)
    os.rename(tmp_path / "copy", tmp_path / "step-002-copy-2")
    (tmp_path / "step-007").mkdir()
    (tmp_path / "step-008").write_text("a file")
    (tmp_path / "step-009").mkdir()
    (tmp_path / "step-009" / "manifest.json").write_text("{}")
    make(tmp_path / "elsewhere", "step-010", 10, 1)
    os.symlink(tmp_path / "elsewhere" / "step-010", tmp_path / "step-010")
    before = set(left(tmp_path))
    assert CheckpointDirectory(str(tmp_path)).prune("best", {"global_steps": 1}, 1, None) == []
    assert CheckpointDirectory(str(tmp_path)).prune("step-005", {"global_steps": 6}, 1, None) == []
    assert CheckpointDirectory(str(tmp_path)).prune("step-005", {"global_steps": 5}, None, None) == []
    assert set(left(tmp_path)) == before
    (note,) = CheckpointDirectory(str(tmp_path)).prune("step-005", {"global_steps": 5}, 2, None)
    assert "removed step-003, step-002, step-001 (checkpoint.keep_last is 2)" in note
    assert before - set(left(tmp_path)) == {"step-001", "step-002", "step-003"}


def test_what_is_being_read_or_written_stays_until_later(tmp_path: Path) -> None:
    for steps in range(1, 5):
        make(tmp_path, f"{steps}", steps, steps)
    draft = directory.StagingDirectory(str(tmp_path), "2")
    with Checkpoint(str(tmp_path / "1")):
        notes = CheckpointDirectory(str(tmp_path)).prune("4", {"global_steps": 4}, 1, None)
        assert len(notes) == 3 and "removed 3 " in notes[0]
        assert "/2: kept for now, because it is being read or written" in notes[1]
        assert {"1", "2", "4"} < set(left(tmp_path))
    draft.discard()
    CheckpointDirectory(str(tmp_path)).prune("4", {"global_steps": 4}, 1, None)
    assert left(tmp_path) == ["4"]


def test_without_knowing_the_latest_nothing_is_removed(tmp_path: Path) -> None:
    for steps in (1, 2):
        make(tmp_path, f"{steps}", steps, steps)
    (tmp_path / "latest").write_bytes(b"\xff")
    (note,) = CheckpointDirectory(str(tmp_path)).prune("2", {"global_steps": 2}, 1, None)
    assert "no older checkpoint is removed" in note
    assert left(tmp_path) == ["1", "2", "latest"]


def test_what_cannot_be_removed_is_told_and_a_killed_removal_is_finished_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for steps in (1, 2):
        make(tmp_path, f"{steps}", steps, steps)
    with monkeypatch.context() as patch:

        def fail(source: str, target: str) -> None:
            raise OSError(30, "Read-only file system")

        patch.setattr(os, "rename", fail)
        (note,) = CheckpointDirectory(str(tmp_path)).prune("2", {"global_steps": 2}, 1, None)
        assert "/1: cannot be removed: Read-only file system (errno 30)" in note
    with monkeypatch.context() as patch:
        patch.setattr(directory, "remove_hidden", lambda path: None)  # as if killed before it
        CheckpointDirectory(str(tmp_path)).prune("2", {"global_steps": 2}, 1, None)
    assert CheckpointDirectory(str(tmp_path)).tags() == ["2"] and len(left(tmp_path)) == 2
    directory.remove_leftovers(str(tmp_path))
    assert left(tmp_path) == ["2"]


def saves(path: str) -> list[list[str]]:
    found = []
    for background in (False, True):
        where = f"{path}/{background}"
        run = Run(config(2, checkpoint={"keep_last": 2, "keep_every": 3, "async_save": background}), seed=1)
        for step in range(1, 9):
            run.step()
            run.engine.save_checkpoint(where)
            if step == 4:
                run.engine.save_checkpoint(where, tag="best", save_latest=False)
        run.engine.destroy()
        found.append(sorted(os.listdir(where)))
    return found


def test_an_engine_keeps_what_it_is_told_to_keep(tmp_path: Path) -> None:
    expected = ["best", "global_step3", "global_step6", "global_step7", "global_step8", "latest"]
    for found in on_ranks(saves, 2, str(tmp_path)):
        assert found == [expected, expected]
