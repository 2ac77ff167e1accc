"""Weights of other programs go straight into shards."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from safetensors.torch import load_file, save_file

import shardwise
from shardwise.checkpoint import open_source
from shardwise.errors import CheckpointError, CheckpointPathError, UsageError
from tests.checkpoint.hostile import Evil, change_a_byte
from tests.checkpoint.job import FROZEN, Model, Run, config, rank
from tests.checkpoint.weights import measures_memory, read_range, save_by_hand, taken
from tests.harness import on_ranks, thorough
from tests.harness.logs import logged
from tests.harness.training import masters

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
@on_ranks(2)
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
    given, wrong = str(forms / "sharded"), str(tmp_path / f"{rank()}.safetensors")
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


@on_ranks(2)
def test_damaged_and_dangerous_files_leave_the_engine_as_it_was(tmp_path: Path) -> None:
    place = tmp_path / str(rank())
    place.mkdir()
    values = without_tie(dict(Model(SEED).state_dict()))
    save_file({k: v.clone() for k, v in values.items()}, place / "short.safetensors")
    torch.save(values, place / "cut.bin")
    for name in ("short.safetensors", "cut.bin"):
        os.truncate(place / name, (place / name).stat().st_size - 300)
    torch.save({"w": torch.zeros(3), "evil": Evil(place / "evil")}, place / "evil.bin")
    torch.save(values, place / "old.bin", _use_new_zipfile_serialization=False)
    torch.save([1, 2], place / "list.bin")
    (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "../x.safetensors"}}))
    save_by_hand(str(place / "checkpoint"), values)
    change_a_byte(place / "checkpoint" / "rank00001of00002-01234561.safetensors")
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
    assert not (place / "evil").exists()
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


# -- state dicts -------------------------------------------------------------------------------------------------------


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.mark.parametrize(("stage", "dtype"), [thorough(0, "fp32"), (1, "bf16"), thorough(2, "fp32"), (3, "bf16")])
@on_ranks(2)
def test_plain_torch_loads_the_weights(stage: int, dtype: str, tmp_path: Path) -> None:
    run = Run(config(stage, dtype), seed=1)
    run.step()
    engine, accountant = run.engine, run.engine.accountant
    accountant.reset_peak()
    before = accountant.total
    assert engine.save_16bit_model(tmp_path) is True
    largest = max(unit.numel for unit in engine.sharded.units) * DTYPES[dtype].itemsize
    assert stage < 3 or accountant.peak_total - before <= largest
    assert engine.save_fp16_model(tmp_path, "trained.safetensors", exclude_frozen_parameters=True) is True
    engine.save_16bit_model(tmp_path / "one", "pytorch_model.bin")
    engine.save_16bit_model(tmp_path / "several", max_shard_size=500)
    engine.save_16bit_model(tmp_path / "several", "plain.pt", max_shard_size="500B")
    with pytest.raises(CheckpointError, match="max_shard_size"):
        engine.save_16bit_model(tmp_path, max_shard_size="big")
    state = engine.module_state_dict()
    run.step()
    values = load_file(tmp_path / "model.safetensors")
    plain = Model(seed=7).to(DTYPES[dtype])
    plain.load_state_dict(values, strict=True)
    assert plain.head.weight is plain.embedding.weight
    assert values.keys() == state.keys() and list(state) == list(plain.state_dict())
    for name, value in state.items():
        # Buffers may differ between ranks; rank 0's are written.
        if "running" not in name or rank() == 0:
            assert value.dtype == values[name].dtype and torch.equal(value, values[name]), name
    assert state["head.weight"].data_ptr() == state["embedding.weight"].data_ptr()
    assert state["blocks.0.inner.weight"].dtype == DTYPES[dtype]
    trained = load_file(tmp_path / "trained.safetensors")
    assert {name for name in values if name not in trained} == set(FROZEN)
    # A state dict of torch, and several files.
    one = torch.load(tmp_path / "one" / "pytorch_model.bin", weights_only=True)
    files = sorted((tmp_path / "several").glob("model-*.safetensors"))
    several = {name: value for file in files for name, value in load_file(file).items()}
    index = json.loads((tmp_path / "several" / "model.safetensors.index.json").read_text())
    parts = sorted((tmp_path / "several").glob("plain-*.pt"))
    loaded = {name: value for file in parts for name, value in torch.load(file, weights_only=True).items()}
    assert len(files) > 2 and len(parts) > 2 and index["weight_map"].keys() == values.keys()
    for found in (one, several, loaded):
        assert found.keys() == values.keys()
        assert all(torch.equal(value, values[name]) for name, value in found.items())
    assert one["head.weight"].data_ptr() == one["embedding.weight"].data_ptr()


@on_ranks(2)
def test_trainers_get_the_state_dict_on_rank_0_and_may_add_it_to_another() -> None:
    engine = Run(config(3, "bf16"), seed=1).engine
    first = engine._zero3_consolidated_16bit_state_dict()
    second = engine._consolidated_16bit_state_dict(exclude_frozen_parameters=True)
    if rank() == 0:
        assert {"head.weight", "statistics.running_mean"} <= set(first)
        assert set(first) - set(second) == set(FROZEN)
    else:
        assert first is second is None
    into: dict[str, Any] = {"mine": 1}
    assert engine.module_state_dict(into, prefix="m.") is into
    assert {"mine", "m.temperature"} <= set(into)
    with pytest.raises(UsageError, match="keep_vars"):
        engine.module_state_dict(keep_vars=True)


@pytest.mark.parametrize(("stage", "wrapped"), [thorough(0, True), (1, False), thorough(2, True), (3, True)])
@on_ranks(2)
def test_master_weights_take_all_digits_of_a_state_dict(stage: int, wrapped: bool) -> None:
    run = Run(config(stage, "bf16"), seed=1)
    run.step()
    for seed, function in ((9, None), (8, lambda src, dst: dst.load_state_dict(src))):
        source = Model(seed).state_dict()
        run.engine.load_module_state_dict({"module": source} if wrapped else source, custom_load_fn=function)
        for index, runs in run.engine.sharded.state.value_runs().items():
            expected = source[run.engine.sharded.registry[index].name].reshape(-1)
            assert all(torch.equal(view, expected[start:stop].to(view.dtype)) for start, stop, view in runs)
        state = run.engine.module_state_dict()
        assert all(torch.equal(state[name], value.to(state[name].dtype)) for name, value in source.items())
    run.step()


@on_ranks(2)
def test_a_state_dict_that_does_not_fit_is_refused() -> None:
    source = Model(seed=9).state_dict()
    missing = {name: value for name, value in source.items() if name != "temperature"}
    engine = Run(config(2), seed=1).engine
    before = engine.module_state_dict()
    for wrong, message in (
        (missing, "missing: temperature"),
        ({**source, "more": torch.zeros(1)}, "not in the model: more"),
        ({**source, "temperature": torch.zeros(2)}, "of another shape: temperature"),
    ):
        with pytest.raises(CheckpointError, match=message):
            engine.load_module_state_dict(wrong)
        assert all(torch.equal(before[name], value) for name, value in engine.module_state_dict().items())
    with pytest.raises(CheckpointError, match="of another shape"):
        engine.load_module_state_dict(wrong, strict=False)
    for strict in (True, False):
        untied = {**source, "head.weight": source["head.weight"] + 1}
        with logged() as told, contextlib.ExitStack() as refused:
            if strict:
                refused.enter_context(pytest.raises(CheckpointError, match=r"tied.*: embedding.weight and head.weight"))
            engine.load_module_state_dict(untied, strict=strict)
        assert any("the first is taken" in line for line in told.lines) is (not strict and rank() == 0)
        assert torch.equal(before["head.weight"], engine.module_state_dict()["head.weight"]) is strict
    engine.load_module_state_dict({**missing, "more": torch.zeros(1)}, strict=False)
    assert torch.equal(engine.module_state_dict()["embedding.weight"], source["embedding.weight"])


@pytest.mark.parametrize("stage", [thorough(1), 3])
@on_ranks(2)
def test_a_function_of_the_user_may_load_the_module(stage: int, tmp_path: Path) -> None:
    source = Run(config(stage, "bf16"), seed=1)
    source.step()
    source.engine.save_checkpoint(tmp_path)
    digits = masters(source.model)
    expected = source.engine.module_state_dict()
    target = Run(config(stage, "bf16"), seed=2)
    seen: dict[str, torch.Tensor] = {}

    def load(src: dict[str, torch.Tensor], dst: torch.nn.Module) -> None:
        seen.update(src)
        dst.load_state_dict({name: value for name, value in src.items() if "blocks.0" not in name}, strict=False)

    before, own = target.engine.module_state_dict(), masters(target.model)
    target.load(tmp_path, custom_load_fn=load)
    after = target.engine.module_state_dict()
    assert "head.weight" in seen and seen["embedding.weight"].dtype == torch.float32
    for name in ("embedding.weight", "head.weight", "blocks.1.inner.weight"):
        assert torch.equal(after[name], expected[name])
    for name in ("blocks.0.inner.weight", "blocks.0.norm.bias"):
        assert torch.equal(after[name], before[name])
    for name, value in masters(target.model).items():  # also where values of the target round alike
        kept = torch.where(own[name].bfloat16() == digits[name].bfloat16(), digits[name], own[name])
        assert torch.equal(value, kept if "blocks.0" in name else digits[name]), name
    target.step()
