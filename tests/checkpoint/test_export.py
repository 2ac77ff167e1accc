"""Weights for other programs: equal in every bit, in little memory, whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch.distributed.checkpoint.metadata import Metadata

import shardwise
from shardwise.checkpoint import export, open_source
from shardwise.checkpoint.formats.weight_files import shard_bytes
from shardwise.checkpoint.safetensors_writer import TensorWriter
from shardwise.checkpoint.unsharded import UnshardedWeights
from shardwise.errors import CheckpointError, CheckpointPathError
from tests.checkpoint.hostile import Evil, change_a_byte
from tests.checkpoint.job import FROZEN, Model, Run, barrier, config, rank
from tests.checkpoint.weights import measures_memory, read_range, save_by_hand, taken
from tests.harness import on_ranks, run_ranks, thorough
from tests.harness.logs import logged
from tests.harness.training import masters

TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def full(run: Run) -> dict[str, torch.Tensor]:
    """Return what export is to give, through the functions for debugging."""
    found = {**run.engine.module_state_dict(), **masters(run.model)}
    return {**found, "head.weight": found["embedding.weight"]}


def exports(path: str, stage: int) -> dict[str, Any]:
    found = {}
    for dtype in ("fp32", "bf16"):
        run = Run(config(stage, dtype), seed=1)
        run.engine.export(f"{path}/{dtype}/new")
        run.step()
        run.engine.save_checkpoint(f"{path}/{dtype}/run")
        run.engine.export(f"{path}/{dtype}/hf", max_shard_size=700)
        accountant = run.engine.accountant
        accountant.reset_peak()
        before = accountant.total
        run.engine.export(f"{path}/{dtype}/pt", format="pt", dtype="float32")
        largest = max(tensor.numel for tensor in run.engine.sharded.registry) * 4
        # What is sent, what arrives and the unsharded tensor; Gloo's thread may hold the first two a moment longer.
        assert accountant.peak_total - before <= 4 * largest, (accountant.peak_total - before, largest)
        run.engine.export(f"{path}/{dtype}/narrow", dtype="bfloat16", exclude_frozen_parameters=True, all_names=True)
        found[dtype] = full(run)
        run.step()
    return found


@on_ranks(2)
def test_any_failure_of_rank_0_is_raised_by_all_ranks(tmp_path: Path) -> None:
    def failing(self: TensorWriter, name: str, start: int, part: torch.Tensor) -> None:
        raise RuntimeError("out of memory")

    run = Run(config(3), seed=1)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(CheckpointError, match="RuntimeError: out of memory"):
        patch.setattr(TensorWriter, "write_part", failing)
        run.engine.export(tmp_path / "out")
    assert rank() or os.listdir(tmp_path / "out") == []


@on_ranks(2)
def test_a_failure_of_one_rank_to_keep_a_state_dict_is_raised_by_all_ranks() -> None:
    def failing(tensor: Any, values: torch.Tensor) -> None:
        raise RuntimeError("out of memory")

    run = Run(config(3), seed=1)
    weights = UnshardedWeights(run.engine.sharded.state)
    with pytest.raises(CheckpointError, match="RuntimeError: out of memory"):
        weights.for_each(failing if rank() else lambda tensor, values: None, "gathering")


@pytest.mark.parametrize("stage", [thorough(0), thorough(1), thorough(2), 3])
def test_an_engine_and_its_checkpoint_export_the_values_of_the_optimizer(stage: int, tmp_path: Path) -> None:
    expected = run_ranks(exports, 2, str(tmp_path), stage)[0]
    for dtype in ("fp32", "bf16"):
        place = tmp_path / dtype
        # Before the first step it is the plain model, with all digits of its trained parameters.
        plain = Model(seed=1).state_dict()
        new = load_file(place / "new" / "model.safetensors")
        assert set(plain) - set(new) == {"head.weight"}
        for name, value in new.items():
            narrow = dtype == "bf16" and name in FROZEN
            assert same(value, plain[name].bfloat16() if narrow else plain[name]), name
        # After it, what the optimizer has.
        written = {}
        for file in sorted((place / "hf").glob("model-*-of-*.safetensors")):
            assert file.stat().st_size < 700 + 4096
            written.update(load_file(file))
        assert len(written) == len(expected[dtype]) - 1 and "head.weight" not in written
        assert all(same(value, expected[dtype][name]) for name, value in written.items())
        back = torch.load(place / "pt" / "pytorch_model.bin", weights_only=True, mmap=True)
        assert back.keys() == expected[dtype].keys()
        for name, value in back.items():
            wide = expected[dtype][name]
            assert same(value, wide.float() if wide.is_floating_point() else wide), name
        narrow = load_file(place / "narrow" / "model.safetensors")
        assert set(back) - set(narrow) == set(FROZEN)
        for name, value in narrow.items():
            wide = expected[dtype][name]
            assert same(value, wide.bfloat16() if wide.is_floating_point() else wide), name
        # The checkpoint gives the same files, byte for byte.
        for directory, options in (
            ("hf", {"max_shard_size": 700}),
            ("pt", {"format": "pt", "dtype": "float32"}),
            ("narrow", {"dtype": torch.bfloat16, "exclude_frozen": True, "all_names": True}),
        ):
            again = tmp_path / f"{dtype}-{directory}"
            export(place / "run", again, **options)
            names = sorted(file.name for file in (place / directory).iterdir())
            assert names == sorted(file.name for file in again.iterdir())
            for name in names:
                assert (again / name).read_bytes() == (place / directory / name).read_bytes(), name


def test_a_plain_module_loads_each_format(tmp_path: Path) -> None:
    (run,) = run_ranks(exports, 1, str(tmp_path), 1)
    expected = run["fp32"]
    plain = Model(seed=9)
    plain.load_state_dict(torch.load(tmp_path / "fp32" / "pt" / "pytorch_model.bin", weights_only=True), strict=True)
    assert all(torch.equal(value, expected[name]) for name, value in plain.state_dict().items())
    export(tmp_path / "fp32" / "run", tmp_path / "one")
    other = Model(seed=9)
    assert load_model(other, tmp_path / "one" / "model.safetensors", strict=True) == (set(), [])
    assert other.head.weight is other.embedding.weight
    assert all(torch.equal(value, expected[name]) for name, value in other.state_dict().items())
    with safe_open(tmp_path / "one" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embedding.weight"}
    index = json.loads((tmp_path / "fp32" / "hf" / "model.safetensors.index.json").read_text())
    files = {file.name: load_file(file) for file in (tmp_path / "fp32" / "hf").glob("*.safetensors")}
    assert index["weight_map"] == {name: file for file, held in files.items() for name in held}
    assert index["metadata"]["total_size"] == sum(t.nbytes for held in files.values() for t in held.values())
    assert sorted(files) == [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)]


@on_ranks(2)
def test_of_a_checkpoint_without_frozen_parameters_the_others_are_exported(tmp_path: Path) -> None:
    run = Run(config(3, "bf16"), seed=1)
    run.engine.save_checkpoint(tmp_path / "run", exclude_frozen_parameters=True)
    barrier()
    if rank() == 0:
        done = export(tmp_path / "run", tmp_path / "out")
        assert "saved without these frozen parameters" in done.warnings[0] and FROZEN[0] in done.warnings[0]
        assert not set(FROZEN) & set(load_file(tmp_path / "out" / "model.safetensors"))
        assert export(tmp_path / "run", tmp_path / "meant", exclude_frozen=True).warnings == []


# -- the directory -----------------------------------------------------------------------------------------------------


def weights(value: float = 0.0) -> dict[str, torch.Tensor]:
    return {f"w{n}": torch.full((n + 1, 50), float(value + n)) for n in range(4)}


def test_old_weights_are_replaced_only_on_request_and_only_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        save_by_hand(str(tmp_path / f"c{number}"), weights(number), cuts=3)
    out = tmp_path / "out"
    (out / "tokenizer").mkdir(parents=True)
    export(tmp_path / "c0", out, max_shard_size=700)
    sharded = sorted(os.listdir(out))
    assert "model-00001-of-00003.safetensors" in sharded and "model.safetensors.index.json" in sharded
    with pytest.raises(
        CheckpointPathError, match=r"holds weights already \(model-00001-of-00003.safetensors, .*overwrite"
    ):
        export(tmp_path / "c1", out)
    # A disk that is full in the midst of it leaves what was there.
    before = {name: (out / name).read_bytes() for name in sharded if (out / name).is_file()}

    def full(self: TensorWriter, name: str, start: int, part: torch.Tensor) -> None:
        if name == "w2":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(self, name, start, part)

    original = TensorWriter.write_part
    monkeypatch.setattr(TensorWriter, "write_part", full)
    with pytest.raises(CheckpointError, match=r"No space left on device.*needed, and what was there before is unch"):
        export(tmp_path / "c1", out, overwrite=True)
    monkeypatch.undo()
    assert sorted(os.listdir(out)) == sharded
    assert all((out / name).read_bytes() == data for name, data in before.items())
    # From several files to one, and back to as many as before: nothing stale is left.
    export(tmp_path / "c1", out, overwrite=True)
    assert sorted(os.listdir(out)) == ["model.safetensors", "tokenizer"]
    assert torch.equal(load_file(out / "model.safetensors")["w3"], weights(1)["w3"])
    export(tmp_path / "c2", out, overwrite=True, max_shard_size=700)
    assert sorted(os.listdir(out)) == sharded
    values = {name: value for file in out.glob("*.safetensors") for name, value in load_file(file).items()}
    assert all(torch.equal(values[name], value) for name, value in weights(2).items())


def shared_buffers(path: str) -> None:
    norm = torch.nn.BatchNorm1d(3)
    model = torch.nn.ModuleDict({"one": norm, "two": torch.nn.Sequential(norm)})
    engine, *_ = shardwise.initialize(model=model, config={"train_batch_size": 2})
    engine.save_checkpoint(path)
    engine.export(f"{path}/direct", format="pt")
    engine.destroy()
    export(path, f"{path}/saved", format="pt")
    for name in ("direct", "saved"):
        values = torch.load(f"{path}/{name}/pytorch_model.bin", weights_only=True)
        assert values.keys() == model.state_dict().keys()
        model.load_state_dict(values, strict=True)


def test_a_module_that_has_two_names_has_them_in_the_state_dict(tmp_path: Path) -> None:
    shared_buffers(str(tmp_path))


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_what_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "c"
    save_by_hand(str(source), weights())
    out = tmp_path / "out"
    for options, message in (
        ({"format": "onnx"}, "format: expected one of hf, pt, dcp, found 'onnx'"),
        ({"dtype": "int8"}, "dtype: expected float32, bfloat16, float16 or keep, found 'int8'"),
        ({"max_shard_size": "5 apples"}, "max_shard_size: expected a size such as '5GB'"),
        ({"max_shard_size": "0GB"}, "max_shard_size: expected a size"),
        ({"format": "dcp", "max_shard_size": "5GB"}, "a file for each tensor"),
        ({"tag": "a"}, "is a checkpoint itself"),
    ):
        with pytest.raises(CheckpointError, match=message):
            export(source, out, **options)
    with pytest.raises(CheckpointPathError, match="no such file or directory"):
        export(tmp_path / "none", out)
    with pytest.raises(CheckpointPathError, match=r"neither a checkpoint \(manifest.json\), nor"):
        (tmp_path / "empty").mkdir()
        export(tmp_path / "empty", out)
    with pytest.raises(CheckpointPathError, match=r"no checkpoint of the tag 'b'\. Checkpoints there: c"):
        export(tmp_path, out, tag="b")
    change_a_byte(source / "rank00001of00002-01234561.safetensors")
    with pytest.raises(CheckpointError, match=r"the checksum of bytes .* is wrong \(they hold .*w"):
        export(source, out)
    assert not out.exists()
    assert export(source, out, verify=False).tensors == 4
    assert [shard_bytes(size) for size in ("1.5 kb", "3MiB", "12", 5)] == [1500, 3 << 20, 12, 5]


def test_values_beyond_float16_are_reported(tmp_path: Path) -> None:
    save_by_hand(str(tmp_path / "c"), {"w": torch.tensor([1.0, 1e6, -1e6, float("inf")]), "v": torch.ones(2)})
    done = export(tmp_path / "c", tmp_path / "out", dtype="float16")
    assert done.warnings == [
        "values beyond the range of float16 became infinite in w (2 values); export as bfloat16 or float32 instead"
    ]


def test_of_a_run_the_newest_complete_checkpoint_is_taken(tmp_path: Path) -> None:
    for number, name in enumerate(("old", "new", "broken")):
        save_by_hand(str(tmp_path / name), weights(number), sequence=number + 1)
    (tmp_path / "latest").write_text("broken")
    shutil.rmtree(tmp_path / "broken")
    with logged() as told:
        export(tmp_path, tmp_path / "a")
    assert any("'latest' names 'broken'; new is taken instead" in line for line in told.lines)
    export(tmp_path, tmp_path / "b", tag="old")
    for place, value in (("a", weights(1)), ("b", weights(0))):
        assert torch.equal(load_file(tmp_path / place / "model.safetensors")["w0"], value["w0"])
    (tmp_path / "new" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="so the checkpoint is incomplete"):
        export(tmp_path / "new", tmp_path / "d")


# -- memory ------------------------------------------------------------------------------------------------------------


@measures_memory
@on_ranks(1)
def test_at_most_two_of_the_largest_tensors_are_in_memory(tmp_path: Path) -> None:
    largest = 32 << 20
    save_by_hand(str(tmp_path / "small"), weights())
    save_by_hand(str(tmp_path / "large"), {f"w{n}": torch.full((4, largest // 16), float(n)) for n in range(5)}, cuts=3)
    for number, (form, dtype) in enumerate([("hf", "keep"), ("hf", "bfloat16"), ("pt", "keep"), ("dcp", "keep")]):
        export(tmp_path / "small", tmp_path / f"s{number}", format=form, dtype=dtype)  # what is loaded on first use
        peak = taken(lambda n=number, f=form, d=dtype: export(tmp_path / "large", tmp_path / f"{n}", format=f, dtype=d))
        assert peak < (3.3 if form == "dcp" else 2) * largest  # torch's writer holds two, and bytes of one


# -- torch.distributed.checkpoint, in and out, without running what is in it -------------------------------------------


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
