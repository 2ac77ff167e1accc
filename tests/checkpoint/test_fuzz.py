"""Random damage is found or does no harm; hostile files give an error and nothing else."""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardwise
from shardwise.checkpoint import Checkpoint, directory, manifestfile, verify
from shardwise.checkpoint import save as saving
from shardwise.checkpoint.listing import CheckpointDirectory
from shardwise.checkpoint.safetensors_reader import TensorFile
from shardwise.checkpoint.safetensors_writer import write_tensors
from shardwise.errors import CheckpointError
from tests.checkpoint import hostile
from tests.checkpoint.job import Run, config, differences, rank
from tests.checkpoint.test_codec import same
from tests.harness import on_ranks, run_ranks, thorough
from tests.harness.logs import logged

randoms = st.integers(0, 2**32 - 1).map(random.Random)
CLIENT = {
    "epoch": 3,
    "best": (float("inf"), torch.tensor(1.5), numpy.float32(2.5)),
    "values": [torch.arange(5.0), numpy.arange(4), b"bytes", {1: None}],
}


def make(path: str) -> None:
    run = Run(config(2, "bf16"), seed=1)
    for tag in ("first", "second"):
        run.step()
        run.engine.save_checkpoint(path, tag=tag, client_state=CLIENT)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of two ranks; `latest` names the second."""
    path = tmp_path_factory.mktemp("saved")
    run_ranks(make, 2, str(path))
    return path


@pytest.fixture(scope="module")
def files(saved: Path) -> hostile.Files:
    """The second checkpoint; all of it has been read once, so that every module that this needs is imported."""
    verify(str(saved / "second"))
    everything(saved / "second")
    return hostile.read_files(saved / "second")


MANY = settings(max_examples=3 * settings().max_examples)
"""More than of other tests, also with `make exhaustive`."""


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scratch") / "a"


def everything(path: Path) -> list[Any]:
    """Return all that a checkpoint holds."""
    with Checkpoint(str(path)) as saved:
        held = saved.manifest
        trees = [held.client, held.scheduler, held.scaler, held.ranks, held.extra, held.optimizer]
        return [*(saved.read(tensor) for tensor in held.tensors), *(saved.decode(tree) for tree in trees)]


@MANY
@given(rng=randoms)
def test_damage_is_found_or_does_no_harm(rng: random.Random, files: hostile.Files, scratch: Path) -> None:
    hostile.write_files(scratch, files)
    expected = everything(scratch)
    told = [hostile.damage(scratch, rng) for _ in range(rng.choice([1, 1, 1, 2, 4]))]
    with hostile.watched(scratch):
        try:
            verify(str(scratch))
        except CheckpointError as error:
            assert str(scratch) in str(error), told
        else:
            assert same(everything(scratch), expected), told
        # Whoever reads without verifying may get other values, but nothing worse.
        with contextlib.suppress(CheckpointError):
            everything(scratch)


def nested(depth: int) -> dict[str, Any]:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


@MANY
@given(rng=randoms)
def test_a_hostile_manifest_gives_an_error_or_values(rng: random.Random, files: hostile.Files, scratch: Path) -> None:
    fields = hostile.fields_of(files["manifest.json"])
    told = hostile.mutate(fields, rng)
    hostile.write_files(scratch, {**files, "manifest.json": hostile.sealed(fields)})
    with hostile.watched(scratch):
        for action in (verify, everything):
            try:
                action(str(scratch))  # type: ignore[operator]
            except CheckpointError as error:
                assert len(str(error)) < 2000, told


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f["tensors"][0].update(shape=[2**40, 2**30]), "is too large"),
        (lambda f: f["tensors"][0].update(shape=[2**30]), "of 1073741824 elements are stored"),
        (lambda f: f["tensors"][0]["slices"].append(dict(f["tensors"][0]["slices"][0])), "expected a run from element"),
        (
            lambda f: f["tensors"].extend(dict(f["tensors"][-1], name=f"{n}") for n in range(999)),
            "tensors of .* in files",
        ),
        (lambda f: f.update(client={"a": f["client"], "b": f["client"]}), "used already"),
        (lambda f: f.update(client=[f["client"]]), "client: expected a dictionary"),
        (lambda f: f.update(client="text"), "client: expected a dictionary"),
        (lambda f: f.update(client=nested(450)), "nested deeper than any"),
        (lambda f: f["counters"].update(global_steps=2**63), "counters"),
        (lambda f: f["counters"].update(micro_steps=10**300), "counters"),
        (lambda f: f["optimizer"]["groups"][0].update(params=[]), "a group in optimizer.groups"),
        (lambda f: f["files"].update({"../x": {"size": 0, "checksums": ["0" * 8]}}), "the name of a file"),
        (
            lambda f: next(iter(f["files"].values())).update(checksums=[]),
            "should have at least 1 item",
        ),
        (lambda f: f.update(created=float("nan")), "NaN is not a number"),
    ],
)
def test_numbers_that_could_not_have_been_written_are_refused(
    change: Any, message: str, files: hostile.Files, scratch: Path
) -> None:
    fields = hostile.fields_of(files["manifest.json"])
    change(fields)
    hostile.write_files(scratch, {**files, "manifest.json": hostile.sealed(fields)})
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(str(scratch))


@MANY
@given(rng=randoms)
def test_a_hostile_header_gives_an_error_or_values(rng: random.Random, scratch: Path) -> None:
    scratch.mkdir(exist_ok=True)
    path = scratch / "x.safetensors"
    path.unlink(missing_ok=True)
    write_tensors(
        str(path), {"x": torch.randn(3, 4), "y": torch.arange(7), "z": torch.zeros(0, 2), "w": torch.ones(())}
    )
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    hostile.mutate(header, rng)
    text = hostile.sealed({"header": header}).split(b'"header": ', 1)[1].rsplit(b"}", 1)[0]
    length = len(text) if rng.random() < 0.9 else rng.choice([0, 2**20, 2**40, 2**63])
    path.write_bytes(length.to_bytes(8, "little") + text + data[end:])
    with hostile.watched(scratch):
        try:
            with TensorFile(str(path)) as file:
                total = sum(file.read(name).nbytes for name in file.specs)
            assert total <= len(data) - end
        except CheckpointError:
            pass


def entry(shape: str, begin: int, end: int) -> str:
    return f'"x":{{"dtype":"F32","shape":{shape},"data_offsets":[{begin},{end}]}}'


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (f"{{{entry('[1]', 0, 4)},{entry('[1]', 0, 4).replace('x', 'y')}}}", "invalid offset"),
        (f"{{{entry('[1]', 0, 4)},{entry('[1]', 4, 8)}}}", "invalid offset"),
        (f"{{{entry('[1]', 4, 8)}}}", "invalid offset"),
        (f"{{{entry('[1]', 0, 4)}}}", "not fully covered"),
        (f"{{{entry('[-1,-1]', 0, 4)}}}", "expected usize"),
        (f"{{{entry('[true]', 0, 4)}}}", "expected usize"),
        (f"{{{entry('[0,4611686018427387904]', 0, 0)},{entry('[2]', 0, 8).replace('x', 'y')}}}", "is not a shape"),
        ("[" * 200_000, "invalid JSON"),
    ],
)
def test_headers_that_the_format_forbids_are_refused(header: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(8))
    with pytest.raises(CheckpointError, match=f"truncated or damaged: .*{message}"):
        TensorFile(str(path))


# -- engines -----------------------------------------------------------------------------------------------------------


@pytest.mark.limit(400)
@pytest.mark.parametrize(
    ("kind", "count"), [("damage", 15), ("malice", 30), thorough("damage", 40), thorough("malice", 80)]
)
@on_ranks(2)
def test_engines_survive_damaged_and_hostile_checkpoints(kind: str, count: int, saved: Path, tmp_path: Path) -> None:
    """Damaged ones are refused without a change of the engine, and the newest complete one is loaded instead."""
    run = Run(config(3, "bf16"), seed=2)
    run.step()
    run.load(saved, "second")
    pristine, second = run.fingerprint(), hostile.read_files(saved / "second")
    for seed in range(count):
        rng = random.Random(seed)
        if rank() == 0:
            hostile.write_files(tmp_path / "first", hostile.read_files(saved / "first"))
            hostile.write_files(tmp_path / "second", second)
            (tmp_path / "latest").write_text("second")
            if kind == "damage":
                hostile.damage(tmp_path / "second", rng)
            else:
                fields = hostile.fields_of(second["manifest.json"])
                hostile.mutate(fields, rng)
                (tmp_path / "second" / "manifest.json").write_bytes(hostile.sealed(fields))
        torch.distributed.barrier()
        expected = run.fingerprint()
        try:
            run.load(tmp_path, "second")
            expected = pristine
        except CheckpointError:
            pass
        if kind == "damage":
            assert differences(run.fingerprint(), expected) == [], seed
            assert run.load(tmp_path)[0] in (f"{tmp_path}/first", f"{tmp_path}/second"), seed
        torch.distributed.barrier()
    run.load(saved, "second")
    assert differences(run.fingerprint(), pristine) == []


# -- what could not have been written, and jobs in one directory -------------------------------------------------------


Fields = dict[str, Any]


def tensor_of(fields: Fields, kind: str) -> Fields:
    return next(t for t in fields["tensors"] if t["kind"] == kind and t["name"] == "blocks.1.inner.weight")


def without_moment(fields: Fields) -> None:
    fields["tensors"].remove(tensor_of(fields, "optimizer/exp_avg_sq"))


def unknown_kind(fields: Fields) -> None:
    tensor_of(fields, "optimizer/exp_avg_sq")["kind"] = "optimizer/evil"


def place(fields: Fields) -> None:
    fields["loader"]["position"] = 10**15


REFUSED: dict[str, tuple[Callable[[Fields], None], str]] = {
    "schedule": (lambda f: f["scheduler"].update(last_batch_iteration=10**18), "'last_batch_iteration' 1000000000"),
    "place in the data": (place, "is beyond its 54 samples"),
    "missing moment": (without_moment, "optimizer state of 'blocks.1.inner.weight' lacks 'exp_avg_sq', and"),
    "unknown kind": (unknown_kind, "optimizer state of 'blocks.1.inner.weight' lacks 'exp_avg_sq', and"),
    "other schedule": (lambda f: f["layout"].update(scheduler="OneCycle"), "OneCycle, and this engine has WarmupLR"),
}


@on_ranks(1)
def test_what_could_not_have_been_written_is_refused(tmp_path: Path) -> None:
    run = Run(config(1), seed=1)
    run.step()
    run.engine.save_checkpoint(tmp_path, tag="a")
    path = tmp_path / "a" / "manifest.json"
    text = path.read_bytes()
    for name, (change, message) in REFUSED.items():
        fields = hostile.fields_of(text)
        change(fields)
        path.write_bytes(hostile.sealed(fields))
        with pytest.raises(CheckpointError) as caught:
            run.load(tmp_path, "a")
        assert message in str(caught.value), name
    path.write_bytes(text)
    run.load(tmp_path, "a")


@on_ranks(1)
def test_names_of_parameters_in_groups_stay_the_engines_own(tmp_path: Path) -> None:
    """Settings of a group with fewer parameters are loaded, as a rank with fewer experts has saved them."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.5)
    engine = shardwise.initialize(model=model, optimizer=optimizer, config={"train_micro_batch_size_per_gpu": 1})[0]
    engine.save_checkpoint(tmp_path, tag="a")
    path = tmp_path / "a" / "manifest.json"
    fields = hostile.fields_of(path.read_bytes())
    fields["optimizer"]["groups"][0].update(param_names=["other"], lr=0.25)
    path.write_bytes(hostile.sealed(fields))
    engine.load_checkpoint(tmp_path, tag="a")
    (group,) = engine.optimizer.param_groups
    assert group["lr"] == 0.25 and list(group["param_names"]) == ["weight", "bias"]


def test_a_huge_manifest_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with open(tmp_path / "a" / "manifest.json", "wb") as file:
        file.truncate(64 << 30)
    with pytest.raises(CheckpointError, match=r"it has 68719476736 bytes, and at most 2147483648 are read"):
        manifestfile.load(str(tmp_path / "a"))


@on_ranks(1)
def test_another_job_in_the_same_directory_is_said_once(tmp_path: Path) -> None:
    engine, own = Run(config(1), seed=1).engine, saving._JOB
    with logged() as told, pytest.MonkeyPatch.context() as patch:
        for number in range(6):  # as if by another job every second time
            patch.setattr(saving, "_JOB", "0123abcd" if number % 2 else own)
            engine.save_checkpoint(tmp_path, tag=f"t{number % 2}")
    assert sum("another job saves here, too" in line for line in told.lines) == 1
    assert CheckpointDirectory(str(tmp_path)).head_of_latest().job == "0123abcd"


def test_two_jobs_may_save_into_one_directory(tmp_path: Path) -> None:
    def job(name: str) -> None:
        for number in range(100):
            draft = directory.StagingDirectory(str(tmp_path), f"{name}{number % 3}")
            directory.write_file(os.path.join(draft.path, "manifest.json"), b"{}")
            draft.publish()
            CheckpointDirectory(str(tmp_path)).set_latest(f"{name}{number % 3}")

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # one job often runs between two system calls of the other
    try:
        with ThreadPoolExecutor(2) as pool:
            for done in [pool.submit(job, name) for name in ("a", "b")]:
                done.result()
    finally:
        sys.setswitchinterval(interval)
    assert sorted(os.listdir(tmp_path)) == ["a0", "a1", "a2", "b0", "b1", "b2", "latest"]
