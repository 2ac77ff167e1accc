"""torch.distributed.checkpoint, in and out, without running what is in it."""

from __future__ import annotations

import errno
import os
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from shardwise.checkpoint import export, open_source
from shardwise.errors import CheckpointError, CheckpointPathError
from tests.checkpoint.hostile import Evil
from tests.checkpoint.weights import read_range, save_by_hand


def values() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return {
        "rows": torch.randn(7, 3, 5, generator=generator),
        "columns": torch.randn(5, 9, 2, generator=generator),
        "line": torch.randn(11, generator=generator).bfloat16(),
        "short": torch.randn(1, 6, generator=generator),
        "number": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
    }


def save_sharded(path: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    places = {"rows": Shard(0), "columns": Shard(1), "line": Shard(0), "short": Shard(0)}
    state = {name: distribute_tensor(v, mesh, [places.get(name, Replicate())]) for name, v in values().items()}
    dcp.save({"model": state, "step": 3, "note": {"x": [1, "a"]}}, checkpoint_id=path)


@pytest.mark.parametrize("world", [1, 3])
def test_sharded_tensors_are_read_by_any_range(ranks: Any, world: int, tmp_path: Path) -> None:
    ranks(save_sharded, world, str(tmp_path / "d"))
    generator = random.Random(world)
    with open_source(tmp_path / "d") as source:
        found = source.tensors()
        assert {name.removeprefix("model.") for name in found} == set(values())
        for name, value in values().items():
            tensor = found[f"model.{name}"]
            assert (tensor.shape, tensor.torch_dtype) == (tuple(value.shape), value.dtype)
            flat = value.reshape(-1)
            cuts = [(0, flat.numel())] + [sorted(generator.choices(range(flat.numel() + 1), k=2)) for _ in range(6)]
            for start, stop in cuts:
                assert torch.equal(read_range(source, tensor.name, start, stop), flat[start:stop]), (name, start, stop)


def test_tensors_that_are_not_contiguous_are_read(tmp_path: Path) -> None:
    value = torch.arange(12.0).view(3, 4)
    dcp.save({"t": value.t(), "part": value[1:]}, checkpoint_id=tmp_path / "d", no_dist=True)
    with open_source(tmp_path / "d") as source:
        assert torch.equal(source.read(source.tensors()["t"]), value.t())
        assert torch.equal(read_range(source, "t", 4, 9), value.t().reshape(-1)[4:9])
        assert torch.equal(read_range(source, "part", 2, 7), value[1:].reshape(-1)[2:7])


def test_torch_loads_what_is_exported(tmp_path: Path) -> None:
    given = values()
    save_by_hand(str(tmp_path / "c"), given, aliases={"short": ["also"]}, cuts=2)
    done = export(tmp_path / "c", tmp_path / "d", format="dcp", dtype="float32")
    assert done.files == [] and done.tensors == len(given)
    target = {name: torch.full_like(value, 7).float() for name, value in given.items()}
    target["also"] = torch.full_like(given["short"], 7)
    dcp.load(target, checkpoint_id=tmp_path / "d", no_dist=True)
    assert all(torch.equal(target[name], value.float()) for name, value in given.items())
    assert torch.equal(target["also"], given["short"])
    assert sorted(os.listdir(tmp_path)) == ["c", "d"]
    with pytest.raises(CheckpointPathError, match="must be new or empty"):
        export(tmp_path / "c", tmp_path / "d", format="dcp")
    with open_source(tmp_path / "d") as source:
        assert torch.equal(source.read(source.tensors()["rows"]), given["rows"])


def test_a_full_disk_is_named_and_nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    save_by_hand(str(tmp_path / "c"), values())
    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", full)
    with pytest.raises(CheckpointError, match=r"/d: cannot be written: .*No space left"):
        export(tmp_path / "c", tmp_path / "d", format="dcp")
    assert os.listdir(tmp_path) == ["c"]


def test_metadata_cannot_run_code(tmp_path: Path) -> None:
    dcp.save({"w": torch.zeros(3)}, checkpoint_id=tmp_path / "d", no_dist=True)
    meta = tmp_path / "d" / ".metadata"
    original = pickle.loads(meta.read_bytes())
    original.planner_data["w"] = Evil(tmp_path / "evil")
    meta.write_bytes(pickle.dumps(original))
    with pytest.raises(CheckpointError, match=r"refers to posix.system. Other objects are not made"):
        open_source(tmp_path / "d")
    changed = b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\n(N(\x8c\x01xK\x01dtb."
    evil = pickle.dumps(Evil(tmp_path / "evil"))
    for content in (b"", b"garbage", changed, pickle.dumps([1]), evil, pickle.dumps({})):
        meta.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"\.metadata"):
            open_source(tmp_path / "d")
    assert not (tmp_path / "evil").exists() and not hasattr(Metadata, "x")
