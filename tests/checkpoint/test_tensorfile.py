from __future__ import annotations

import os
import zlib
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from shardwise.checkpoint.checksums import crc32
from shardwise.checkpoint.safetensors_reader import Spec, TensorFile
from shardwise.checkpoint.safetensors_writer import TensorWriter, write_tensors
from shardwise.errors import CheckpointError

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
}


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare bit by bit, also dtypes that have no arithmetic."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def test_checksums_are_those_of_zlib() -> None:
    data = os.urandom(4099)
    assert crc32(data[70:], crc32(data[:70])) == zlib.crc32(data) and crc32.__module__ != "zlib"


def test_the_safetensors_library_reads_the_file(tmp_path: Path) -> None:
    path = str(tmp_path / "a.safetensors")
    facts = write_tensors(path, TENSORS)
    assert facts.size == os.path.getsize(path)
    back = load_file(path)
    assert back.keys() == TENSORS.keys()
    assert all(equal(back[name], TENSORS[name]) for name in TENSORS)
    with safe_open(path, "pt") as file:
        assert equal(file.get_slice("a/b[3:9]")[10:20], TENSORS["a/b[3:9]"][10:20])


def test_a_file_of_the_safetensors_library_is_read(tmp_path: Path) -> None:
    path = str(tmp_path / "a.safetensors")
    save_file({k: v for k, v in TENSORS.items()}, path, {"format": "pt"})
    with TensorFile(path) as file:
        assert all(equal(file.read(name), TENSORS[name]) for name in TENSORS)


def test_ranges_are_read_into_views_and_converted(tmp_path: Path) -> None:
    path = str(tmp_path / "a.safetensors")
    values = torch.randn(100)
    write_tensors(path, {"x": values})
    target = torch.zeros(50)
    with TensorFile(path) as file:
        file.read_into("x", 90, target[5:15])
        low = torch.zeros(10, dtype=torch.bfloat16)
        file.read_into("x", 0, low)
        file.read_into("x", 100, torch.zeros(0))
        with pytest.raises(CheckpointError, match=r"'x' has no elements \[95, 105\)"):
            file.read_into("x", 95, torch.zeros(10))
        with pytest.raises(CheckpointError, match="there is no tensor 'y'"):
            file.read("y")
    assert torch.equal(target[5:15], values[90:])
    assert not target[:5].any() and not target[15:].any()
    assert torch.equal(low, values[:10].bfloat16())


def test_streamed_files_may_be_written_in_any_order(tmp_path: Path) -> None:
    path = str(tmp_path / "a.safetensors")
    specs = {name: Spec(tensor.dtype, tuple(tensor.shape)) for name, tensor in TENSORS.items()}
    writer = TensorWriter(path, specs, {"format": "pt"})
    for name in sorted(TENSORS):
        writer.write_part(name, 0, TENSORS[name])
    writer.close()
    back = load_file(path)
    assert all(equal(back[name], TENSORS[name]) for name in TENSORS)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}


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
    back = load_file(path)
    assert all(equal(back[name], TENSORS[name]) for name in TENSORS)


def test_the_default_device_has_no_say(tmp_path: Path) -> None:
    path = str(tmp_path / "a.safetensors")
    write_tensors(path, TENSORS)
    out = torch.zeros(3, dtype=torch.float64)
    with torch.device("meta"), TensorFile(path) as file:
        assert equal(file.read("a/b[3:9]"), TENSORS["a/b[3:9]"])
        file.read_into("a/b[3:9]", 2, out)
    assert torch.equal(out, TENSORS["a/b[3:9]"][2:5].double())
