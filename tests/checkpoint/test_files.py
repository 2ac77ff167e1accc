"""Files of tensors, written through the page cache and past it, and read by several threads."""

from __future__ import annotations

import errno
import fcntl
import os
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from shardwise.checkpoint import Checkpoint, reader, safetensors_writer, save
from shardwise.checkpoint.checksums import crc32
from shardwise.checkpoint.formats.torch_save_writer import StateFileWriter
from shardwise.checkpoint.safetensors_reader import DTYPE_NAMES, Spec, TensorFile
from shardwise.checkpoint.safetensors_writer import FileWriter, TensorWriter, write_tensors
from shardwise.config import resolve
from shardwise.errors import CheckpointError
from tests.checkpoint.hostile import change_a_byte
from tests.checkpoint.job import Run, config
from tests.checkpoint.weights import save_by_hand
from tests.harness import on_ranks

TENSORS = {
    "flags": torch.tensor([True, False, True]),
    "odd": torch.arange(7, dtype=torch.int8),
    "half": torch.randn(3, 5).half(),
    "brain": torch.randn(9).bfloat16(),
    "wide": torch.randn(2, 2, dtype=torch.float64),
    "number": torch.tensor(7),
    "empty": torch.zeros(0, 4),
    "unsigned": torch.arange(5).to(torch.uint32),
    "float8": torch.randn(5).to(torch.float8_e4m3fn),
    "a/b[3:9]": torch.randn(1031),
    "largest": torch.randn(300, 16),
}
SPECS = {name: Spec(tensor.dtype, tuple(tensor.shape)) for name, tensor in TENSORS.items()}


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare bit by bit, also dtypes that have no arithmetic."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def assert_read_by_the_library(path: str) -> None:
    back = load_file(path)
    assert back.keys() == TENSORS.keys()
    assert all(equal(back[name], TENSORS[name]) for name in TENSORS)


def test_checksums_are_those_of_zlib() -> None:
    data = os.urandom(4099)
    assert crc32(data[70:], crc32(data[:70])) == zlib.crc32(data) and crc32.__module__ != "zlib"


# -- safetensors -------------------------------------------------------------------------------------------------------


def test_files_and_those_of_the_safetensors_library_are_read_by_each_other(tmp_path: Path) -> None:
    ours, theirs, streamed = (str(tmp_path / name) for name in ("ours", "theirs", "streamed"))
    facts = write_tensors(ours, TENSORS)
    assert facts.size == os.path.getsize(ours)
    assert_read_by_the_library(ours)
    with TensorFile(ours) as file:
        begins = {name: file.span(name)[0] for name in TENSORS}
    assert begins["largest"] % 64 == 0 and all(begins[name] % t.itemsize == 0 for name, t in TENSORS.items())
    save_file({**TENSORS}, theirs, {"format": "pt"})
    with TensorFile(theirs) as file:
        assert all(equal(file.read(name), TENSORS[name]) for name in TENSORS)
    writer = TensorWriter(streamed, SPECS, {"format": "pt"})
    for name in sorted(TENSORS):  # in any order
        writer.write_part(name, 0, TENSORS[name])
    writer.close()
    assert_read_by_the_library(streamed)
    with safe_open(streamed, "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_ranges_are_read_into_views_and_converted_whatever_the_default_device(tmp_path: Path) -> None:
    path = str(tmp_path / "a.safetensors")
    values = torch.randn(100)
    write_tensors(path, {"x": values})
    target, low = torch.zeros(50), torch.zeros(10, dtype=torch.bfloat16)
    with TensorFile(path) as file:
        with torch.device("meta"):
            assert equal(file.read("x"), values)
            file.read_into("x", 90, target[5:15])
            file.read_into("x", 0, low)
        file.read_into("x", 100, torch.zeros(0))
        with pytest.raises(CheckpointError, match=r"'x' has no elements \[95, 105\)"):
            file.read_into("x", 95, torch.zeros(10))
        with pytest.raises(CheckpointError, match="there is no tensor 'y'"):
            file.read("y")
    assert torch.equal(target[5:15], values[90:])
    assert not target[:5].any() and not target[15:].any()
    assert torch.equal(low, values[:10].bfloat16())


@pytest.mark.parametrize("before", [b"", b"short", bytes(5000)])
def test_a_file_that_is_written_over_keeps_its_place(before: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(before)
    place = path.stat().st_ino
    with pytest.raises(FileExistsError):
        write_tensors(str(path), TENSORS)
    assert path.read_bytes() == before
    write_tensors(str(path), TENSORS, over=True)
    assert path.stat().st_ino == place
    assert_read_by_the_library(str(path))


# -- torch.save --------------------------------------------------------------------------------------------------------


def random_tensors() -> dict[str, torch.Tensor]:
    """A tensor of every dtype that safetensors has, and of odd shapes."""
    generator = torch.Generator().manual_seed(3)
    found = {}
    for number, dtype in enumerate(DTYPE_NAMES):
        count = 3 * (2 * number + 5) * dtype.itemsize
        raw = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), generator=generator, dtype=torch.uint8)
        found[f"layer.{number}.{dtype}"] = raw.view(dtype).view(3, -1)
    return {**found, "number": torch.tensor(1.5), "empty": torch.zeros(0, 3), "after": torch.arange(7.0)}


@pytest.mark.parametrize("mmap", [False, True])
def test_torch_loads_a_state_dict_that_was_written_piece_by_piece(mmap: bool, tmp_path: Path) -> None:
    tensors = random_tensors()
    path = str(tmp_path / "a.bin")
    specs = {name: Spec(t.dtype, tuple(t.shape)) for name, t in tensors.items()}
    writer = StateFileWriter(path, specs, {"number": ("other", "third")})
    for name, tensor in tensors.items():
        flat = tensor.reshape(-1)
        for start in range(0, flat.numel(), 4):
            writer.write_part(name, start, flat[start : start + 4])
    writer.close()
    back = torch.load(path, weights_only=True, mmap=mmap)
    names = list(tensors)
    assert list(back) == [*names[:-2], "other", "third", *names[-2:]]
    for name, tensor in tensors.items():
        assert equal(back[name], tensor) and back[name].stride() == tensor.stride(), name
    assert back["other"].data_ptr() == back["number"].data_ptr()
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None  # every CRC is right


# -- past the page cache -----------------------------------------------------------------------------------------------

BUFFER = 8192


def write_directly(path: Path, data: bytes, step: int) -> FileWriter:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(safetensors_writer, "_BUFFER", BUFFER)
        patch.setattr(safetensors_writer, "LARGE", 1)
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
    write_directly(tmp_path / "x", data, step)
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
    assert not write_directly(tmp_path / "x", data, 1000).direct
    assert (tmp_path / "x").read_bytes() == data


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({}, (False, True)),
        ({"writer": {"type": "python"}}, (False, False)),
        ({"writer": {"type": "fast"}}, (True, True)),
        ({"writer": {}}, (True, True)),
    ],
)
def test_the_key_or_the_kind_of_save_decides(section: dict[str, Any], expected: tuple[bool, bool]) -> None:
    found = resolve({"train_batch_size": 1, "checkpoint": section}).config.checkpoint
    assert (found.writes_directly(background=False), found.writes_directly(background=True)) == expected


@on_ranks(1)
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


# -- threads -----------------------------------------------------------------------------------------------------------


def test_threads_are_this_ranks_part_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    found = []
    for ranks in ("1", "2", "4", "8", "x", ""):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        found.append(reader.workers())
    assert found == [4, 3, 1, 1, 4, 4]


def test_threads_read_and_verify_as_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "workers", lambda: 4)
    tensors = {str(n): torch.randn((1 << 20) + n) for n in range(5)}
    path = tmp_path / "c"
    save_by_hand(str(path), tensors, cuts=3)
    with Checkpoint(str(path)) as saved:
        saved.verify(saved.blocks())
        places = [(tensor, start) for tensor in saved.manifest.tensors for start in (0, 777, 9999)]
        runs = [(tensor, start, torch.zeros(1000, dtype=torch.float64)) for tensor, start in places]
        saved.read_all(runs)
    for tensor, start, out in runs:
        assert torch.equal(out, tensors[tensor.name][start : start + 1000].double())
    change_a_byte(next(path.glob("rank00001*")))
    with Checkpoint(str(path)) as saved, pytest.raises(CheckpointError, match="they hold"):
        saved.verify(saved.blocks())
