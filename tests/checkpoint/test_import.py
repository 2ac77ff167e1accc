"""Weights of other programs go straight into shards."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from safetensors.torch import save_file

import shardwise
from shardwise.checkpoint import open_source
from shardwise.errors import CheckpointError, CheckpointPathError
from tests.checkpoint.job import Model, Run, as_ranks, config
from tests.checkpoint.weights import measures_memory, read_range, save_by_hand, taken
from tests.harness import on_ranks, thorough

SEED = 9
FORMS = ("single", "sharded", "bin", "bins", "wrapped.pt", "dcp", "checkpoint")


def without_tie(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in values.items() if name != "head.weight"}


def split(path: Path, values: dict[str, torch.Tensor], ending: str, save: Any) -> None:
    path.mkdir()
    stem = {"safetensors": "model", "bin": "pytorch_model"}[ending]
    names = sorted(values)
    held = {f"{stem}-0000{n}-of-00003.{ending}": names[n - 1 :: 3] for n in (1, 2, 3)}
    for file, inside in held.items():
        save({name: values[name] for name in inside}, path / file)
    index = {"metadata": {}, "weight_map": {name: file for file, inside in held.items() for name in inside}}
    (path / f"{stem}.{ending}.index.json").write_text(json.dumps(index))


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights of one model in every form."""
    path = tmp_path_factory.mktemp("forms")
    values = {name: value.clone() for name, value in Model(SEED).state_dict().items()}
    values["statistics.running_mean"] += 0.25
    once = without_tie(values)
    (path / "single").mkdir()
    save_file(once, path / "single" / "model.safetensors", {"format": "pt"})
    split(path / "sharded", once, "safetensors", save_file)
    (path / "bin").mkdir()
    torch.save(values, path / "bin" / "pytorch_model.bin")
    split(path / "bins", values, "bin", torch.save)
    torch.save({"epoch": 3, "state_dict": values}, path / "wrapped.pt")
    torch.distributed.checkpoint.save(values, checkpoint_id=path / "dcp", no_dist=True)
    save_by_hand(str(path / "checkpoint" / "a"), once, aliases={"embedding.weight": ["head.weight"]}, cuts=3)
    return path


def expected() -> dict[str, torch.Tensor]:
    values = dict(Model(SEED).state_dict())
    values["statistics.running_mean"] = values["statistics.running_mean"] + 0.25
    return values


@pytest.mark.parametrize(("stage", "dtype"), [thorough(0, "fp32"), thorough(1, "bf16"), (3, "bf16")])
@as_ranks(2)
def test_every_form_is_loaded_with_all_digits(forms: Path, stage: int, dtype: str) -> None:
    run = Run(config(stage, dtype), seed=1)
    run.step()
    sharded, values = run.engine.sharded, expected()
    state = {index: dict(sharded.update.state(index)) for index in range(3)}
    for form in FORMS:
        run.engine.load_module_state_dict(Run(config(0), seed=2).engine.module_state_dict())
        assert not any(run.engine.load_weights(forms / form)), form
        for index, runs in sharded.state.value_runs().items():
            whole = values[sharded.registry[index].name].reshape(-1)
            # All digits: masters are fp32 where the module computes in bf16.
            assert all(torch.equal(view, whole[start:stop].to(view.dtype)) for start, stop, view in runs), form
        for name, value in run.engine.module_state_dict().items():
            assert torch.equal(value, values[name].to(value.dtype)), (form, name)
    after = {index: dict(sharded.update.state(index)) for index in range(3)}
    assert all(torch.equal(after[i][key], value) for i in state for key, value in state[i].items() if key != "step")
    run.step()


class Larger(torch.nn.Module):
    """The job's model under another name, with one parameter more."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Model(1)
        self.more = torch.nn.Parameter(torch.ones(3))


def inner(name: str) -> str:
    return f"inner.{name}"


@on_ranks(2)
def test_names_are_matched_before_anything_is_changed(forms: Path, tmp_path: Path) -> None:
    settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    with shardwise.zero.Init(config_dict_or_path=settings):
        model = Larger()
    engine, *_ = shardwise.initialize(model=model, config=settings)
    given, wrong = str(forms / "sharded"), str(tmp_path / f"{torch.distributed.get_rank()}.safetensors")
    save_file({**without_tie(dict(Model(SEED).state_dict())), "temperature": torch.zeros(2)}, wrong)
    before = engine.module_state_dict()
    attempts: list[tuple[str, dict[str, Any], str]] = [
        (given, {}, "missing: more, .*; not in the model: .*rename="),
        (wrong, {"rename": inner, "strict": False}, r"of another shape: inner.temperature \(given \[2\], model \[\]\)"),
        (given, {"rename": lambda name: "more"}, "become 'more'"),
        (given, {"rename": lambda name: 5}, "expected a name or None"),
        (f"{given}/never", {}, "no such file or directory"),
        (given, {"rename": inner}, "missing: more"),
    ]
    for path, options, message in attempts:
        with pytest.raises(CheckpointError, match=message):
            engine.load_weights(path, **options)
        after = engine.module_state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before), message
    some = {"temperature": "inner.temperature", "nothing": None}
    missing, unexpected = engine.load_weights(given, rename=some, strict=False)
    assert "inner.temperature" not in missing and "inner.nothing" in missing
    assert "embedding.weight" in unexpected and not set(some) & set(unexpected)
    assert engine.load_weights(given, rename=inner, strict=False) == (["more"], [])
    after = engine.module_state_dict()
    assert all(torch.equal(after[f"inner.{name}"], value) for name, value in expected().items())
    engine.destroy()


class Evil:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("touch evil",)


@as_ranks(2)
def test_damaged_and_dangerous_files_leave_the_engine_as_it_was(tmp_path: Path) -> None:
    place = tmp_path / str(torch.distributed.get_rank())
    place.mkdir()
    values = without_tie(dict(Model(SEED).state_dict()))
    save_file({k: v.clone() for k, v in values.items()}, place / "short.safetensors")
    torch.save(values, place / "cut.bin")
    for name in ("short.safetensors", "cut.bin"):
        os.truncate(place / name, (place / name).stat().st_size - 300)
    torch.save({"w": torch.zeros(3), "evil": Evil()}, place / "evil.bin")
    torch.save(values, place / "old.bin", _use_new_zipfile_serialization=False)
    torch.save([1, 2], place / "list.bin")
    (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "../x.safetensors"}}))
    save_by_hand(str(place / "checkpoint"), values)
    file = place / "checkpoint" / "rank00001of00002-01234561.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    run = Run(config(2), seed=1)
    before = run.engine.module_state_dict()
    for name, message in {
        "short.safetensors": "truncated",
        "evil.bin": "holds objects of posix.system",
        "cut.bin": "truncated or damaged",
        "old.bin": "before torch 1.6",
        "list.bin": "expected a state dict",
        "model.safetensors.index.json": "in its directory",
        "checkpoint": "wrong",
    }.items():
        with pytest.raises(CheckpointError, match=message):
            run.engine.load_weights(place / name)
    after = run.engine.module_state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not list(tmp_path.glob("**/evil")) and not os.path.exists("evil")
    run.step()


def test_sources_say_what_they_are(forms: Path, tmp_path: Path) -> None:
    for form in FORMS:
        with open_source(forms / form) as source:
            tensor = source.tensors()["blocks.1.inner.weight"]
            assert (tensor.shape, tensor.torch_dtype) == ((11, 11), torch.float32)
            whole = expected()[tensor.name].reshape(-1)
            for start, stop in ((0, 121), (3, 4), (7, 90), (120, 121), (5, 5)):
                assert torch.equal(read_range(source, tensor.name, start, stop), whole[start:stop]), form
            with pytest.raises(CheckpointError):
                read_range(source, tensor.name, 100, 122)
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(CheckpointPathError, match=r"expected a directory, or a file that ends in \.safetensors"):
        open_source(tmp_path / "notes.txt")
    for name in "ab":
        save_file({"w": torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointPathError, match=r"holds 2 safetensors files \(a.safetensors, b.safetensors\)"):
        open_source(tmp_path)


# -- memory ------------------------------------------------------------------------------------------------------------


def growth(path: str, width: int) -> int:
    settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    with shardwise.zero.Init(config_dict_or_path=settings):
        model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(6)))
    engine, *_ = shardwise.initialize(model=model, config=settings)
    engine.load_weights(f"{path}/small", strict=False)  # whatever is loaded on first use
    torch.distributed.barrier()
    peak = taken(lambda: engine.load_weights(f"{path}/large"))
    for runs in engine.sharded.state.value_runs().values():
        assert all(bool((view == 1.5).all()) for _, _, view in runs)
    engine.destroy()
    return peak


@measures_memory
def test_all_ranks_together_take_no_more_than_the_model_and_a_fifth(ranks: Any, tmp_path: Path) -> None:
    width = 3072
    for name, size in (("small", 3), ("large", width)):
        (tmp_path / name).mkdir()
        value = torch.full((size, size), 1.5, dtype=torch.bfloat16)
        names = [f"{n}.weight" for n in range(6)] if name == "large" else ["x"]
        save_file({key: value.clone() for key in names}, tmp_path / name / "model.safetensors")
    model = 6 * width * width * 4
    # The shards are there before; what is added is for reading.
    assert sum(ranks(growth, 2, str(tmp_path), width)) < 0.2 * model
