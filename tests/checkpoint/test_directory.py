from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from shardwise.checkpoint import directory
from shardwise.checkpoint.listing import CheckpointDirectory
from shardwise.errors import CheckpointError, CheckpointPathError


def write(draft: directory.StagingDirectory, text: str) -> str:
    name = f"rank00000of00001-{draft.token}.safetensors"
    directory.write_file(os.path.join(draft.path, name), text.encode())
    directory.write_file(os.path.join(draft.path, "manifest.json"), name.encode())
    return name


def content(parent: Path, tag: str) -> str:
    return (parent / tag / (parent / tag / "manifest.json").read_text()).read_text()


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
    with pytest.raises(ValueError, match="save_dir: expected the path of a directory"):
        directory.check_directory(path, "save_dir")


def test_overwriting_keeps_one_checkpoint_and_foreign_files(tmp_path: Path) -> None:
    first = directory.StagingDirectory(str(tmp_path), "a")
    write(first, "one")
    first.publish()
    (tmp_path / "a" / "notes.txt").write_text("mine")
    second = directory.StagingDirectory(str(tmp_path), "a")
    name = write(second, "two")
    assert content(tmp_path, "a") == "one"
    second.publish()
    assert content(tmp_path, "a") == "two"
    assert sorted(os.listdir(tmp_path / "a")) == ["manifest.json", "notes.txt", name]
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


@pytest.mark.parametrize("data", [b"", b"../x", b"\xff\xfe"])
def test_a_damaged_latest_is_an_error(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "latest").write_bytes(data)
    with pytest.raises(CheckpointError, match="latest"):
        CheckpointDirectory(str(tmp_path)).latest()


def test_files_of_a_checkpoint_that_is_read_stay_when_its_tag_is_saved_again(tmp_path: Path) -> None:
    first = directory.StagingDirectory(str(tmp_path), "a")
    names = [write(first, "one")]
    first.publish()
    held = directory.Hold(str(tmp_path / "a"))
    second = directory.StagingDirectory(str(tmp_path), "a")
    names.append(write(second, "two"))
    second.publish()
    assert not held.is_current()
    assert set(names) < set(os.listdir(tmp_path / "a")) and content(tmp_path, "a") == "two"
    held.release()
    third = directory.StagingDirectory(str(tmp_path), "a")
    last = write(third, "three")
    third.publish()
    assert sorted(os.listdir(tmp_path / "a")) == ["manifest.json", last]


def test_a_full_disk_leaves_no_staging_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        directory.StagingDirectory(str(tmp_path), "a")
    assert os.listdir(tmp_path) == []
