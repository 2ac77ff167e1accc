"""Weights of other programs go straight into shards."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from safetensors.torch import save_file

import shardwise
from shardwise.checkpoint import open_source
from shardwise.errors import CheckpointError, CheckpointPathError
from tests.checkpoint.job import Model, Run, config, on_ranks
from tests.checkpoint.weights import read_range, save_by_hand
from tests.harness import thorough

SEED = 9
FORMS = ("single", "sharded", "bin", "bins", "wrapped", "dcp", "checkpoint")


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
    torch.save({"epoch": 3, "state_dict": values}, path / "wrapped")
    (path / "wrapped").rename(path / "wrapped.pt")
    torch.distributed.checkpoint.save(values, checkpoint_id=path / "dcp", no_dist=True)
    save_by_hand(str(path / "checkpoint" / "a"), once, aliases={"embedding.weight": ["head.weight"]}, cuts=3)
    return path


def expected() -> dict[str, torch.Tensor]:
    values = dict(Model(SEED).state_dict())
    values["statistics.running_mean"] = values["statistics.running_mean"] + 0.25
    return values


def load_all(path: str, stage: int, dtype: str) -> dict[str, list[str]]:
    run = Run(config(stage, dtype), seed=1)
    run.step()
    state = {index: dict(run.engine.sharded.update.state(index)) for index in range(3)}
    wrong: dict[str, list[str]] = {}
    for form in FORMS:
        scratch = Run(config(0), seed=2).engine.module_state_dict()
        run.engine.load_module_state_dict(scratch)
        place = f"{path}/{form}" + (".pt" if form == "wrapped" else "")
        differing = run.engine.load_weights(place)
        values = expected()
        bad = [f"reported {differing}"] if any(differing) else []
        for index, runs in run.engine.sharded.state.value_runs().items():
            tensor = run.engine.sharded.registry[index]
            for start, stop, view in runs:
                # All digits: masters are fp32 where the module computes in bf16.
                if not torch.equal(view, values[tensor.name].reshape(-1)[start:stop].to(view.dtype)):
                    bad.append(tensor.name)
        for name, value in run.engine.module_state_dict().items():
            if not torch.equal(value, values[name].to(value.dtype)):
                bad.append(f"plain {name}")
        wrong[form] = bad
    after = {index: dict(run.engine.sharded.update.state(index)) for index in range(3)}
    assert all(torch.equal(after[i][key], value) for i in state for key, value in state[i].items() if key != "step")
    run.step()
    return wrong


@pytest.mark.parametrize(("stage", "dtype"), [thorough(0, "fp32"), thorough(1, "bf16"), (3, "bf16")])
def test_every_form_is_loaded_with_all_digits(forms: Path, stage: int, dtype: str) -> None:
    for wrong in on_ranks(load_all, 2, str(forms), stage, dtype):
        assert wrong == {form: [] for form in FORMS}


class Larger(torch.nn.Module):
    """The job's model under another name, with one parameter more."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Model(1)
        self.more = torch.nn.Parameter(torch.ones(3))


def mismatches(path: str, wrong: str) -> dict[str, Any]:
    settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    with shardwise.zero.Init(config_dict_or_path=settings):
        model = Larger()
    engine, *_ = shardwise.initialize(model=model, config=settings)
    before = engine.module_state_dict()
    found: dict[str, Any] = {}

    def attempt(key: str, *args: Any, **options: Any) -> None:
        try:
            found[key] = engine.load_weights(*args, **options)
        except CheckpointError as error:
            found[key] = str(error)
            after = engine.module_state_dict()
            assert all(torch.equal(before[name], after[name]) for name in before), key

    attempt("names", path)
    attempt("shape", wrong, rename=lambda name: f"inner.{name}", strict=False)
    attempt("twice", path, rename=lambda name: "more")
    attempt("bad", path, rename=lambda name: 5)
    attempt("nothing", f"{path}/never")
    attempt("some", path, rename={"temperature": "inner.temperature", "nothing": None}, strict=False)
    before = engine.module_state_dict()
    attempt("strict", path, rename=lambda name: f"inner.{name}")
    found["prefix"] = engine.load_weights(path, rename=lambda name: f"inner.{name}", strict=False)
    values = expected()
    after = engine.module_state_dict()
    assert all(torch.equal(after[f"inner.{name}"], value) for name, value in values.items())
    engine.destroy()
    return found


def test_names_are_matched_before_anything_is_changed(ranks: Any, forms: Path, tmp_path: Path) -> None:
    wrong = without_tie({name: value.clone() for name, value in Model(SEED).state_dict().items()})
    wrong["temperature"] = torch.zeros(2)
    save_file(wrong, tmp_path / "model.safetensors")
    found = ranks(mismatches, 2, str(forms / "sharded"), str(tmp_path))[0]
    assert re.search(r"missing: more, .*; not in the model: .*rename=", found["names"])
    assert "of another shape: inner.temperature (given [2], model [])" in found["shape"]
    assert "become 'more'" in found["twice"] and "expected a name or None" in found["bad"]
    assert "no such file or directory" in found["nothing"]
    assert "missing: more" in found["strict"] and "not in the model" not in found["strict"]
    assert found["prefix"] == (["more"], [])
    missing, unexpected = found["some"]
    assert "inner.temperature" not in missing and "inner.nothing" in missing
    assert "embedding.weight" in unexpected and "nothing" not in unexpected and "temperature" not in unexpected


def damaged(paths: list[str]) -> list[str]:
    run = Run(config(2), seed=1)
    before = run.engine.module_state_dict()
    messages = []
    for path in paths:
        with pytest.raises(CheckpointError) as caught:
            run.engine.load_weights(path)
        messages.append(str(caught.value))
    after = run.engine.module_state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    run.step()
    return messages


class Evil:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("touch evil",)


def test_damaged_and_dangerous_files_leave_the_engine_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = without_tie(dict(Model(SEED).state_dict()))
    save_file({k: v.clone() for k, v in values.items()}, tmp_path / "short.safetensors")
    data = (tmp_path / "short.safetensors").read_bytes()
    (tmp_path / "short.safetensors").write_bytes(data[:-10])
    torch.save({"w": torch.zeros(3), "evil": Evil()}, tmp_path / "evil.bin")
    torch.save(values, tmp_path / "cut.bin")
    (tmp_path / "cut.bin").write_bytes((tmp_path / "cut.bin").read_bytes()[:-300])
    torch.save(values, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    torch.save([1, 2], tmp_path / "list.bin")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "../x.safetensors"}}))
    save_by_hand(str(tmp_path / "checkpoint"), values)
    file = tmp_path / "checkpoint" / "rank00001of00002-01234561.safetensors"
    flipped = bytearray(file.read_bytes())
    flipped[-1] ^= 4
    file.write_bytes(flipped)
    names = ["short.safetensors", "evil.bin", "cut.bin", "old.bin", "list.bin", "model.safetensors.index.json"]
    paths = [str(tmp_path / name) for name in [*names, "checkpoint"]]
    for messages in on_ranks(damaged, 2, paths):
        for message, part in zip(
            messages,
            (
                "truncated",
                "weights_only=True",
                "not a complete file",
                "before torch 1.6",
                "expected a state dict",
                "in its directory",
                "wrong",
            ),
            strict=True,
        ):
            assert part in message
    assert not list(tmp_path.glob("**/evil")) and not os.path.exists("evil")


def test_sources_say_what_they_are(forms: Path, tmp_path: Path) -> None:
    for form in FORMS:
        place = forms / (form + (".pt" if form == "wrapped" else ""))
        with open_source(place) as source:
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


def _status(name: str) -> int:
    found = re.search(name + r":\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found.group(1)) << 10


def growth(path: str, width: int) -> int:
    settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    with shardwise.zero.Init(config_dict_or_path=settings):
        model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(6)))
    engine, *_ = shardwise.initialize(model=model, config=settings)
    engine.load_weights(f"{path}/small", strict=False)  # whatever is loaded on first use
    torch.distributed.barrier()
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    engine.load_weights(f"{path}/large")
    peak = _status("VmHWM") - before
    for runs in engine.sharded.state.value_runs().values():
        assert all(bool((view == 1.5).all()) for _, _, view in runs)
    engine.destroy()
    return peak


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the kernel does not tell the peak")
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
