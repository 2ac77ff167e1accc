"""Files that are written through the page cache, and past it."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwise.checkpoint import directory, file_writer
from shardwise.checkpoint.file_writer import CachedFile, DirectFile, create
from shardwise.checkpoint.writer import WriteJob, _write_part
from shardwise.config import resolve
from tests.harness import run_ranks

BUFFER = 8192
SIZES = [0, 1, BUFFER - 1, BUFFER, BUFFER + 1, 2 * BUFFER, 5 * BUFFER + 77]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_writer, "_BUFFER", BUFFER)
    monkeypatch.setattr(file_writer, "LARGE", 1)


def _write(path: Path, data: bytes, step: int) -> file_writer.Output:
    file = create(str(path), len(data), direct=True)
    scratch = bytearray(step)
    for start in range(0, len(data), step):
        piece = data[start : start + step]
        scratch[: len(piece)] = piece
        file.write(memoryview(scratch)[: len(piece)])
        scratch[:] = bytes(step)  # bytes may change as soon as write() has returned
    file.finish()
    file.abandon()
    return file


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("step", [100, BUFFER, 3 * BUFFER])
def test_bytes_are_those_that_were_given(size: int, step: int, tmp_path: Path) -> None:
    data = os.urandom(size)
    _write(tmp_path / "x", data, step)
    assert (tmp_path / "x").read_bytes() == data


def test_the_page_cache_is_passed_by_where_that_is_possible(tmp_path: Path) -> None:
    flags: list[int] = []
    write = os.write

    def seen(descriptor: int, data: Any) -> int:
        flags.append(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
        return write(descriptor, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", seen)
        file = _write(tmp_path / "x", os.urandom(2 * BUFFER + 5), BUFFER)
    assert isinstance(file, DirectFile)
    # The end is no multiple of a block, and goes through it.
    assert flags == [os.O_DIRECT if file.direct else 0] * 2 + [0]


def test_small_files_and_those_that_may_be_cached_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_writer, "LARGE", 100)
    for name, size, direct, expected in [("a", 99, True, CachedFile), ("b", 100, True, DirectFile)]:
        file = create(str(tmp_path / name), size, direct=direct)
        assert type(file) is expected
        file.abandon()
    file = create(str(tmp_path / "c"), 100)
    assert type(file) is CachedFile
    file.abandon()


def _refuse_flag(patch: pytest.MonkeyPatch) -> None:
    call = fcntl.fcntl

    def fcntl_(descriptor: int, command: int, value: int = 0) -> int:
        if command == fcntl.F_SETFL and value & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return call(descriptor, command, value)

    patch.setattr(fcntl, "fcntl", fcntl_)


def _refuse_writes(patch: pytest.MonkeyPatch) -> None:
    write = os.write

    def refused(descriptor: int, data: Any) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(descriptor, data)

    patch.setattr(os, "write", refused)


@pytest.mark.parametrize("refuse", [_refuse_flag, _refuse_writes])
def test_a_file_system_that_cannot_do_it_gets_the_bytes_through_the_cache(
    refuse: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch)
    data = os.urandom(3 * BUFFER + 9)
    file = _write(tmp_path / "x", data, 1000)
    assert isinstance(file, DirectFile) and not file.direct
    assert (tmp_path / "x").read_bytes() == data


@pytest.mark.parametrize("good", [0, 1, 3])
def test_a_full_disk_is_told_and_nothing_stays_open(good: int, tmp_path: Path) -> None:
    write, calls = os.write, []

    def full(descriptor: int, data: Any) -> int:
        calls.append(descriptor)
        if len(calls) > good:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data)

    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", full)
        file = DirectFile(str(tmp_path / "x"))
        with pytest.raises(OSError, match="No space left") as raised:
            for _ in range(4):
                file.write(memoryview(bytes(BUFFER)))
            file.finish()
        assert raised.value.errno == errno.ENOSPC
        file.abandon()
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.parametrize("kind", [DirectFile, lambda path: CachedFile(path, 10)])
def test_a_file_that_exists_is_left_alone(kind: Callable[[str], file_writer.Output], tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"old")
    with pytest.raises(FileExistsError):
        kind(str(tmp_path / "x"))
    assert (tmp_path / "x").read_bytes() == b"old"


@pytest.mark.parametrize("before", [b"", b"short", b"more than what is written now"])
def test_a_file_that_is_written_over_keeps_its_place(before: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(before)
    place = path.stat().st_ino
    file = create(str(path), 9, direct=True, over=True)
    file.write(memoryview(b"nine "))
    file.write(memoryview(b"here"))
    file.finish()
    assert path.read_bytes() == b"nine here"
    assert path.stat().st_ino == place


def test_cached_files_go_to_disk_while_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[int] = []
    monkeypatch.setattr(os, "fdatasync", flushed.append)
    file = CachedFile(str(tmp_path / "x"), 5)
    file.write(memoryview(b"some"))
    deadline = time.monotonic() + 20
    while not flushed and time.monotonic() < deadline:
        time.sleep(0.01)
    file.write(memoryview(b"!"))
    file.finish()
    assert flushed
    assert (tmp_path / "x").read_bytes() == b"some!"


def save(path: str, writer: dict[str, Any] | None, asynchronous: bool) -> bool:
    """Save a checkpoint whose files count as large."""
    import torch
    from torch import nn

    import shardwise

    torch.manual_seed(0)
    file_writer.LARGE, file_writer._BUFFER = 1, BUFFER
    seen: list[str] = []
    made = file_writer.DirectFile.__init__
    file_writer.DirectFile.__init__ = lambda self, path: (seen.append(path), made(self, path))[1]  # type: ignore[method-assign]
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3},
        "checkpoint": {"writer": writer} if writer is not None else {},
    }
    try:
        engine, *_ = shardwise.initialize(model=nn.Sequential(nn.Linear(50, 61), nn.Linear(61, 50)), config=config)
        engine.backward(engine(torch.ones(1, 50)).sum())
        engine.step()
        engine.save_checkpoint(path, tag="a", asynchronous=asynchronous)
        engine.wait_for_checkpoint()
        other = shardwise.checkpoint.verify(f"{path}/a")
        engine.load_checkpoint(path)
        engine.destroy()
    finally:
        file_writer.LARGE, file_writer._BUFFER, file_writer.DirectFile.__init__ = 64 << 20, 4 << 20, made  # type: ignore[method-assign]
    assert other.counters["global_steps"] == 1
    return bool(seen)


@pytest.mark.parametrize(
    ("writer", "expected"),
    [(None, (False, True)), ({"type": "python"}, (False, False)), ({"type": "fast"}, (True, True)), ({}, (True, True))],
)
def test_the_key_or_the_kind_of_save_decides(writer: dict[str, Any] | None, expected: tuple[bool, bool]) -> None:
    section = {} if writer is None else {"writer": writer}
    found = resolve({"train_batch_size": 1, "checkpoint": section}).config.checkpoint
    assert (found.writes_directly(background=False), found.writes_directly(background=True)) == expected


@pytest.mark.parametrize("writer", [None, {"type": "fast"}])
def test_the_engine_does_what_the_key_says(writer: dict[str, Any] | None, tmp_path: Path) -> None:
    used = run_ranks(save, 2, str(tmp_path), writer, False)
    assert used == [writer is not None] * 2


def test_in_the_background_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = directory.StagingDirectory(str(tmp_path), "a")
    data = os.urandom(3 * BUFFER + 20)
    seen: list[str] = []
    made = DirectFile.__init__
    monkeypatch.setattr(DirectFile, "__init__", lambda self, path: (seen.append(path), made(self, path))[1])
    for direct in (False, True):
        job = WriteJob(
            0, 1, str(tmp_path), "a", draft.token, (3 * BUFFER, len(data) - 10, len(data)), len(data), (), direct
        )
        _write_part(job, memoryview(data))
        (file,) = Path(draft.path).glob("*.safetensors")
        assert file.read_bytes() == data[: 3 * BUFFER]
        assert seen == [str(file)] * direct
        file.unlink()
    draft.discard()
