"""Files that are written through the page cache, and past it."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from shardwise.checkpoint import safetensors_writer, save
from shardwise.checkpoint.safetensors_writer import FileWriter
from shardwise.config import resolve
from tests.checkpoint.job import Run, as_ranks, config

BUFFER = 8192


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_writer, "_BUFFER", BUFFER)
    monkeypatch.setattr(safetensors_writer, "LARGE", 1)


def write(path: Path, data: bytes, step: int) -> FileWriter:
    file = FileWriter(str(path), len(data), direct=True)
    scratch = bytearray(step)
    for start in range(0, len(data), step):
        piece = data[start : start + step]
        scratch[: len(piece)] = piece
        file.write(memoryview(scratch)[: len(piece)])
        scratch[:] = bytes(step)  # bytes may change as soon as write() has returned
    file.finish()
    file.abandon()
    return file


@pytest.mark.parametrize("size", [0, 1, BUFFER - 1, BUFFER, BUFFER + 1, 5 * BUFFER + 77])
@pytest.mark.parametrize("step", [100, 3 * BUFFER])
def test_bytes_are_those_that_were_given(size: int, step: int, tmp_path: Path) -> None:
    data = os.urandom(size)
    write(tmp_path / "x", data, step)
    assert (tmp_path / "x").read_bytes() == data


def test_a_file_system_that_cannot_do_it_gets_the_bytes_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = os.write

    def written(descriptor: int, data: Any) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return put(descriptor, data)

    monkeypatch.setattr(os, "write", written)
    data = os.urandom(3 * BUFFER + 9)
    assert not write(tmp_path / "x", data, 1000).direct
    assert (tmp_path / "x").read_bytes() == data


@pytest.mark.parametrize(
    ("writer", "expected"),
    [(None, (False, True)), ({"type": "python"}, (False, False)), ({"type": "fast"}, (True, True)), ({}, (True, True))],
)
def test_the_key_or_the_kind_of_save_decides(writer: dict[str, Any] | None, expected: tuple[bool, bool]) -> None:
    section = {} if writer is None else {"writer": writer}
    found = resolve({"train_batch_size": 1, "checkpoint": section}).config.checkpoint
    assert (found.writes_directly(background=False), found.writes_directly(background=True)) == expected


@as_ranks(1)
def test_saves_in_the_background_are_direct(tmp_path: Path) -> None:
    seen: list[bool] = []
    original = save.write_tensors

    def noted(*args: Any, direct: bool = False, **more: Any) -> Any:
        seen.append(direct)
        return original(*args, direct=direct, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save, "write_tensors", noted)
        engine = Run(config(1), seed=1).engine
        engine.save_checkpoint(tmp_path, tag="a")
        engine.save_checkpoint(tmp_path, tag="b", asynchronous=True)
        engine.wait_for_checkpoint()
    assert seen == [False, True]
