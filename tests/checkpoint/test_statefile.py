"""State dicts that are written piece by piece are files of torch.save."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch

from shardwise.checkpoint.formats.torch_save_writer import StateFileWriter
from shardwise.checkpoint.safetensors_reader import DTYPE_NAMES, Spec


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def random_tensors() -> dict[str, torch.Tensor]:
    """A tensor of every dtype that safetensors has, and of odd shapes."""
    generator = torch.Generator().manual_seed(3)
    found = {}
    for number, dtype in enumerate(DTYPE_NAMES):
        count = 3 * (2 * number + 5) * dtype.itemsize
        raw = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), generator=generator, dtype=torch.uint8)
        found[f"layer.{number}.{dtype}"] = raw.view(dtype).view(3, -1)
    found["number"] = torch.tensor(1.5)
    found["empty"] = torch.zeros(0, 3)
    found["after the empty one"] = torch.arange(7.0)
    return found


@pytest.mark.parametrize("mmap", [False, True])
def test_torch_loads_what_was_written(mmap: bool, tmp_path: Path) -> None:
    tensors = random_tensors()
    path = str(tmp_path / "a.bin")
    writer = StateFileWriter(
        path, {name: Spec(t.dtype, tuple(t.shape)) for name, t in tensors.items()}, {"number": ("other", "third")}
    )
    for name, tensor in tensors.items():
        flat = tensor.reshape(-1)
        for start in range(0, flat.numel(), 4):
            writer.write_part(name, start, flat[start : start + 4])
    writer.close()
    back = torch.load(path, weights_only=True, mmap=mmap)
    names = list(tensors)
    assert list(back) == [*names[:-2], "other", "third", *names[-2:]]
    for name, tensor in tensors.items():
        assert (back[name].dtype, back[name].shape) == (tensor.dtype, tensor.shape)
        assert back[name].stride() == tensor.stride()
        assert bits(back[name]) == bits(tensor), name
    assert back["other"].data_ptr() == back["number"].data_ptr()
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None  # every CRC is right
