"""Directories of checkpoints: tags, staging, which checkpoint is the newest, and which ones retention removes."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.checkpoint import Checkpoint, Manifest, directory, manifestfile
from shardwise.checkpoint.checksums import FileFacts
from shardwise.checkpoint.listing import CheckpointDirectory, StateNumbers
from shardwise.errors import CheckpointError, CheckpointPathError
from tests.checkpoint.job import Run, config
from tests.harness import on_ranks


def write(draft: directory.StagingDirectory, text: str) -> str:
    name = f"rank00000of00001-{draft.token}.safetensors"
    directory.write_file(os.path.join(draft.path, name), text.encode())
    directory.write_file(os.path.join(draft.path, "manifest.json"), name.encode())
    return name


def publish(parent: Path, tag: str, text: str) -> str:
    draft = directory.StagingDirectory(str(parent), tag)
    name = write(draft, text)
    draft.publish()
    return name


def content(parent: Path, tag: str) -> str:
    return (parent / tag / (parent / tag / "manifest.json").read_text()).read_text()


def make(parent: Path, tag: str, steps: int, number: int, finite: bool = True, created: float = 0.0) -> None:
    """Put down a checkpoint with one small file."""
    path, file = parent / tag, "rank00000of00001-01234567.safetensors"
    path.mkdir(parents=True)
    (path / file).write_bytes(b"data")
    layout: dict[str, Any] = {"sequence": number} if number else {}
    if not finite:
        layout["finite"] = False
    found = Manifest(tag, created, {}, layout, {}, {file: FileFacts(4, ("00000000",))}, [])
    found.counters["global_steps"] = steps
    (path / "manifest.json").write_bytes(manifestfile.to_bytes(found))


def prune(parent: Path, tag: str, steps: int, last: int | None, every: int | None = None, **more: Any) -> list[str]:
    return CheckpointDirectory(str(parent)).prune(tag, {"global_steps": steps}, last, every, **more)


def ordered(parent: Path) -> list[str]:
    return CheckpointDirectory(str(parent)).newest_first().tags


# -- names and staging -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tag", ["", ".", "..", ".a", "a/b", "a\\b", "latest", "a\nb", "x" * 201, "é" * 101, "\ud800", " a"]
)
def test_tags_that_name_no_directory_are_refused(tag: str) -> None:
    with pytest.raises(CheckpointPathError, match="checkpoint tag"):
        directory.check_tag(tag)


def test_tags_may_be_numbers_and_contain_spaces() -> None:
    assert directory.check_tag(7) == "7"
    assert directory.check_tag("step 3 (best)") == "step 3 (best)"


@pytest.mark.parametrize("path", ["", None, b"x", 3])
def test_paths_that_are_none_are_value_errors(path: object) -> None:
    with pytest.raises(ValueError, match="save_dir"):
        directory.check_directory(path, "save_dir")


def test_overwriting_keeps_foreign_files_and_those_of_a_checkpoint_that_is_read(tmp_path: Path) -> None:
    names = [publish(tmp_path, "a", "one")]
    (tmp_path / "a" / "notes.txt").write_text("mine")
    held = directory.Hold(str(tmp_path / "a"))
    draft = directory.StagingDirectory(str(tmp_path), "a")
    names.append(write(draft, "two"))
    assert content(tmp_path, "a") == "one"
    draft.publish()
    assert not held.is_current()
    assert set(names) < set(os.listdir(tmp_path / "a")) and content(tmp_path, "a") == "two"
    held.release()
    last = publish(tmp_path, "a", "three")
    assert sorted(os.listdir(tmp_path / "a")) == ["manifest.json", "notes.txt", last]
    assert os.listdir(tmp_path) == ["a"]


def killed(parent: Path, tag: str) -> Path:
    """Leave a draft as a killed writer does."""
    draft = directory.StagingDirectory(str(parent), tag, tidy=False)
    write(draft, "half")
    draft._unlock()
    return Path(draft.path)


def test_leftovers_of_killed_writers_are_removed_and_those_of_living_ones_are_not(tmp_path: Path) -> None:
    living = directory.StagingDirectory(str(tmp_path), "a")
    write(living, "one")
    killed(tmp_path, "b.c")
    (tmp_path / ".b.01234567.partial").mkdir()  # before the first file, or after the removal of the last
    killed(tmp_path, "latest")  # written, and not renamed
    other = directory.StagingDirectory(str(tmp_path), "c")
    assert set(os.listdir(tmp_path)) == {os.path.basename(living.path), os.path.basename(other.path)}
    other.discard()
    living.publish()
    assert content(tmp_path, "a") == "one"


STRANGE = [
    *(".gone.partial", ".my-backup.gone.partial", ".rsync.partial", ".x.writer.partial", ".a.01234567.partial"),
    *(".downloads.partial", "visible.partial", ".hidden", ".latest.01234567.partial", ".latest.mine.partial"),
]


def test_what_others_have_left_stays(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    for path in (outside, *(tmp_path / "runs" / name for name in STRANGE)):
        (path / "sub").mkdir(parents=True)
        (path / "sub" / "thesis.tex").write_text("mine")
        (path / "writer.lock").write_text("")
        os.utime(path, (0, 0))
    (tmp_path / "runs" / ".file.01234567.partial").write_text("mine")
    (tmp_path / "runs" / ".link.01234567.partial").symlink_to(killed(tmp_path / "elsewhere", "a"))
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    directory.remove_leftovers(str(tmp_path / "runs"))
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before


def test_a_full_disk_leaves_no_staging_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        directory.StagingDirectory(str(tmp_path), "a")
    assert os.listdir(tmp_path) == []


# -- which one is the newest -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"", b"../x", b"\xff\xfe"])
def test_a_damaged_latest_is_an_error_and_nothing_is_removed(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "latest").write_bytes(data)
    for action in (CheckpointDirectory(str(tmp_path)).latest, CheckpointDirectory(str(tmp_path)).newest_first):
        with pytest.raises(CheckpointError, match="latest"):
            action()
    for steps in (1, 2):
        make(tmp_path, f"{steps}", steps, steps)
    (note,) = prune(tmp_path, "2", 2, 1)
    assert "no older checkpoint is removed" in note
    assert sorted(os.listdir(tmp_path)) == ["1", "2", "latest"]


def test_numbers_order_and_times_do_not(tmp_path: Path) -> None:
    for number, (tag, created) in enumerate([("a", 300.0), ("b", 9e9), ("c", 100.0)], 1):
        make(tmp_path, tag, 1, number, created=created)
        os.utime(tmp_path / tag, (9e9 - created, 9e9 - created))
    assert ordered(tmp_path) == ["c", "b", "a"]
    (tmp_path / "latest").write_text("b\nchanged by hand")
    assert ordered(tmp_path) == ["b", "c", "a"]


def test_manifests_without_numbers_come_first_in_time_and_go_by_steps(tmp_path: Path) -> None:
    for tag, steps, number in (("old9", 9, 0), ("old80", 80, 0), ("new1", 1, 1)):
        make(tmp_path, tag, steps, number)
    assert ordered(tmp_path) == ["new1", "old80", "old9"]
    assert CheckpointDirectory(str(tmp_path)).head("old80").steps == 80


def test_what_is_not_finite_or_not_readable_comes_last(tmp_path: Path) -> None:
    for number, tag in enumerate(("a", "b", "c"), 1):
        make(tmp_path, tag, 1, number, finite=tag != "c")
    os.truncate(tmp_path / "b" / "manifest.json", 60)
    assert ordered(tmp_path) == ["a", "b", "c"]


def test_numbers_are_above_those_of_another_job_in_the_directory(tmp_path: Path) -> None:
    numbers = StateNumbers()
    assert numbers.after(str(tmp_path)) == 1
    numbers.see(1)
    make(tmp_path, "other", 1, 7)
    CheckpointDirectory(str(tmp_path)).set_latest("other")
    assert numbers.after(str(tmp_path)) == 8
    make(tmp_path / "earlier", "unnamed", 1, 9)  # and `latest` names nothing
    assert numbers.after(str(tmp_path / "earlier")) == 10


# -- retention ---------------------------------------------------------------------------------------------------------


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
        notes = prune(parent, f"global_step{saved[-1]}", saved[-1], keep_last, keep_every)
        whole = [steps for steps in saved if steps not in damaged]
        expected = {
            steps
            for steps in saved
            if steps in whole[-keep_last:]
            or steps in damaged
            or steps == latest
            or (keep_every is not None and steps % keep_every == 0)
        }
        assert set(os.listdir(folder)) == {"latest", *(f"global_step{steps}" for steps in expected)}
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
    before = set(os.listdir(tmp_path))
    assert prune(tmp_path, "best", 1, 1) == []
    assert prune(tmp_path, "step-005", 6, 1) == []
    assert prune(tmp_path, "step-005", 5, None) == []
    assert set(os.listdir(tmp_path)) == before
    (note,) = prune(tmp_path, "step-005", 5, 2)
    assert "removed step-003, step-002, step-001 (checkpoint.keep_last is 2)" in note
    assert before - set(os.listdir(tmp_path)) == {"step-001", "step-002", "step-003"}


def test_what_is_being_read_or_written_stays_until_later(tmp_path: Path) -> None:
    for steps in range(1, 5):
        make(tmp_path, f"{steps}", steps, steps)
    draft = directory.StagingDirectory(str(tmp_path), "2")
    with Checkpoint(str(tmp_path / "1")):
        notes = prune(tmp_path, "4", 4, 1)
        assert len(notes) == 3 and "removed 3 " in notes[0]
        assert "/2: kept for now, because it is being read or written" in notes[1]
        assert {"1", "2", "4"} < set(os.listdir(tmp_path))
    draft.discard()
    prune(tmp_path, "4", 4, 1)
    assert sorted(os.listdir(tmp_path)) == ["4"]


def test_what_cannot_be_removed_is_told_and_a_killed_removal_is_finished_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for steps in (1, 2):
        make(tmp_path, f"{steps}", steps, steps)
    with monkeypatch.context() as patch:

        def fail(source: str, target: str) -> None:
            raise OSError(30, "Read-only file system")

        patch.setattr(os, "rename", fail)
        (note,) = prune(tmp_path, "2", 2, 1)
        assert "/1: cannot be removed: Read-only file system (errno 30)" in note
    with monkeypatch.context() as patch:
        patch.setattr(directory, "remove_hidden", lambda path: None)  # as if killed before it
        prune(tmp_path, "2", 2, 1)
    assert CheckpointDirectory(str(tmp_path)).tags() == ["2"] and len(os.listdir(tmp_path)) == 2
    directory.remove_leftovers(str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["2"]


def test_retention_counts_checkpoints_with_and_without_finite_values(tmp_path: Path) -> None:
    for steps, finite in enumerate([True, True, False, False, False], 1):
        make(tmp_path, f"s{steps}", steps, 100 + steps, finite=finite)
    assert prune(tmp_path, "s5", 5, 2, finite=False) != []
    assert sorted(os.listdir(tmp_path)) == ["s2", "s4", "s5"]
    make(tmp_path, "s6", 6, 106)
    prune(tmp_path, "s6", 6, 2)
    assert sorted(os.listdir(tmp_path)) == ["s5", "s6"]


@pytest.mark.parametrize("background", [False, True])
@on_ranks(2)
def test_an_engine_keeps_what_it_is_told_to_keep(background: bool, tmp_path: Path) -> None:
    run = Run(config(2, checkpoint={"keep_last": 2, "keep_every": 3, "async_save": background}), seed=1)
    for step in range(1, 9):
        run.step()
        run.engine.save_checkpoint(tmp_path)
        if step == 4:
            run.engine.save_checkpoint(tmp_path, tag="best", save_latest=False)
    run.engine.destroy()
    expected = ["best", "global_step3", "global_step6", "global_step7", "global_step8", "latest"]
    assert sorted(os.listdir(tmp_path)) == expected
