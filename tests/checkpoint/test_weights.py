"""Plain weights out of a sharded engine, and into one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from shardwise.errors import CheckpointError, UsageError
from tests.checkpoint.job import FROZEN, Model, Run, config, on_ranks

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def export(path: str, stage: int, dtype: str) -> dict[str, Any]:
    run = Run(config(stage, dtype), seed=1)
    run.step()
    accountant = run.engine.accountant
    accountant.reset_peak()
    before = accountant.total
    assert run.engine.save_16bit_model(path) is True
    peak = accountant.peak_total - before
    assert run.engine.save_fp16_model(path, "trained.safetensors", exclude_frozen_parameters=True) is True
    largest = max(unit.numel for unit in run.engine.sharded.units)
    state = run.engine.module_state_dict()
    run.step()
    return {"peak": peak, "largest": largest, "state": state}


@pytest.mark.parametrize(("stage", "dtype"), [(0, "fp32"), (1, "bf16"), (2, "fp32"), (3, "bf16")])
def test_plain_torch_loads_the_weights(stage: int, dtype: str, tmp_path: Path) -> None:
    results = on_ranks(export, 2, str(tmp_path), stage, dtype)
    assert sorted(os.listdir(tmp_path)) == ["model.safetensors", "trained.safetensors"]
    values = load_file(tmp_path / "model.safetensors")
    plain = Model(seed=7).to(DTYPES[dtype])
    plain.load_state_dict(values, strict=True)
    assert plain.head.weight is plain.embedding.weight
    assert values.keys() == plain.state_dict().keys()
    for result in results:
        state = result["state"]
        assert list(state) == list(plain.state_dict())
        for name, value in state.items():
            # Buffers may differ between ranks; rank 0's are written.
            if "running" not in name or result is results[0]:
                assert value.dtype == values[name].dtype and torch.equal(value, values[name]), name
        assert state["head.weight"].data_ptr() == state["embedding.weight"].data_ptr()
        assert state["blocks.0.inner.weight"].dtype == DTYPES[dtype]
        if stage == 3:
            assert result["peak"] <= result["largest"] * DTYPES[dtype].itemsize
    trained = load_file(tmp_path / "trained.safetensors")
    assert {name for name in values if name not in trained} == set(FROZEN)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def in_other_files(path: str, stage: int) -> dict[str, torch.Tensor]:
    run = Run(config(stage, "bf16"), seed=1)
    run.step()
    run.engine.save_16bit_model(f"{path}/one", "pytorch_model.bin")
    run.engine.save_16bit_model(f"{path}/several", max_shard_size=500)
    run.engine.save_16bit_model(f"{path}/several", "plain.pt", max_shard_size="500B")
    with pytest.raises(CheckpointError, match="max_shard_size: expected a size"):
        run.engine.save_16bit_model(path, max_shard_size="big")
    return run.engine.module_state_dict()


@pytest.mark.parametrize("stage", [1, 3])
def test_weights_may_be_a_state_dict_of_torch_and_in_several_files(stage: int, tmp_path: Path) -> None:
    expected = on_ranks(in_other_files, 2, str(tmp_path), stage)[0]
    one = torch.load(tmp_path / "one" / "pytorch_model.bin", weights_only=True)
    files = sorted((tmp_path / "several").glob("model-*.safetensors"))
    several = {name: value for file in files for name, value in load_file(file).items()}
    index = json.loads((tmp_path / "several" / "model.safetensors.index.json").read_text())
    parts = sorted((tmp_path / "several").glob("plain-*.pt"))
    loaded = {name: value for file in parts for name, value in torch.load(file, weights_only=True).items()}
    assert len(files) > 2 and len(parts) > 2 and index["weight_map"].keys() == expected.keys()
    for found in (one, several, loaded):
        assert found.keys() == expected.keys()
        assert all(torch.equal(value, expected[name]) for name, value in found.items())
    assert one["head.weight"].data_ptr() == one["embedding.weight"].data_ptr()


def consolidated(stage: int) -> list[Any]:
    run = Run(config(stage, "bf16"), seed=1)
    first = run.engine._zero3_consolidated_16bit_state_dict()
    second = run.engine._consolidated_16bit_state_dict(exclude_frozen_parameters=True)
    return [None if found is None else sorted(found) for found in (first, second)]


def test_trainers_get_the_state_dict_on_rank_0() -> None:
    (first, second), other = on_ranks(consolidated, 2, 3)
    assert other == [None, None]
    assert "head.weight" in first and "statistics.running_mean" in first
    assert set(first) - set(second) == set(FROZEN)


def options(path: str) -> list[str]:
    run = Run(config(3), seed=1)
    into: dict[str, Any] = {"mine": 1}
    found = run.engine.module_state_dict(into, prefix="m.")
    assert found is into
    with pytest.raises(UsageError, match="keep_vars"):
        run.engine.module_state_dict(keep_vars=True)
    return sorted(into)


def test_a_state_dict_may_be_added_to_another(tmp_path: Path) -> None:
    names = on_ranks(options, 2, str(tmp_path))[0]
    assert names[-1] == "mine" or "mine" in names
    assert "m.temperature" in names


def load_plain(stage: int, dtype: str, wrapped: bool) -> list[float]:
    source = Model(seed=9).state_dict()
    run = Run(config(stage, dtype), seed=1)
    run.step()
    run.engine.load_module_state_dict({"module": source} if wrapped else source)
    gaps = []
    for index, runs in run.engine.sharded.state.value_runs().items():
        tensor = run.engine.sharded.registry[index]
        for start, stop, view in runs:
            expected = source[tensor.name].reshape(-1)[start:stop].to(view.dtype)
            gaps.append(float((view.float() - expected.float()).abs().max()))
    state = run.engine.module_state_dict()
    for name, value in source.items():
        gaps.append(float((state[name].float() - value.to(state[name].dtype).float()).abs().sum()))
    run.step()
    return gaps


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_master_weights_take_all_digits_of_a_state_dict(stage: int) -> None:
    for gaps in on_ranks(load_plain, 2, stage, "bf16", stage % 2 == 0):
        assert len(gaps) > 15
        assert max(gaps) == 0.0


def load_wrong(how: str, strict: bool) -> str:
    source = Model(seed=9).state_dict()
    if how == "missing":
        del source["temperature"]
    if how == "unexpected":
        source["more"] = torch.zeros(1)
    if how == "shape":
        source["temperature"] = torch.zeros(2)
    run = Run(config(2), seed=1)
    before = run.engine.module_state_dict()
    try:
        run.engine.load_module_state_dict(source, strict=strict)
    except CheckpointError as error:
        after = run.engine.module_state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)
        return str(error)
    after = run.engine.module_state_dict()
    assert torch.equal(after["embedding.weight"], source["embedding.weight"])
    return ""


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("missing", "missing: temperature"),
        ("unexpected", "not in the model: more"),
        ("shape", "of another shape: temperature (given [2], model [])"),
    ],
)
def test_a_state_dict_that_does_not_fit_is_refused(how: str, message: str) -> None:
    assert all(message in found for found in on_ranks(load_wrong, 2, how, True))
    loose = on_ranks(load_wrong, 2, how, False)
    assert all((found == "") == (how != "shape") for found in loose)


def custom(path: str, stage: int) -> dict[str, Any]:
    source = Run(config(stage, "bf16"), seed=1)
    source.step()
    source.engine.save_checkpoint(path)
    expected = source.engine.module_state_dict()
    target = Run(config(stage, "bf16"), seed=2)
    seen: dict[str, Any] = {}

    def load(src: dict[str, torch.Tensor], dst: torch.nn.Module) -> None:
        seen.update(names=sorted(src), dtype=src["embedding.weight"].dtype)
        dst.load_state_dict({name: value for name, value in src.items() if "blocks.0" not in name}, strict=False)

    before = target.engine.module_state_dict()
    target.load(path, custom_load_fn=load)
    after = target.engine.module_state_dict()
    moved = {name for name in after if torch.equal(after[name].float(), expected[name].float())}
    kept = {name for name in after if torch.equal(after[name], before[name])}
    target.step()
    return {**seen, "moved": moved, "kept": kept}


@pytest.mark.parametrize("stage", [1, 3])
def test_a_function_of_the_user_may_load_the_module(stage: int, tmp_path: Path) -> None:
    result = on_ranks(custom, 2, str(tmp_path), stage)[0]
    assert "head.weight" in result["names"] and result["dtype"] == torch.float32
    assert {"embedding.weight", "head.weight", "blocks.1.inner.weight"} <= result["moved"]
    assert {"blocks.0.inner.weight", "blocks.0.norm.bias"} <= result["kept"]


def frozen_left_out(path: str, stage: int) -> dict[str, Any]:
    source = Run(config(stage, "bf16"), seed=1)
    source.step()
    source.engine.save_checkpoint(path, exclude_frozen_parameters=True)
    expected = source.engine.module_state_dict()
    target = Run(config(stage, "bf16"), seed=2)
    before = target.engine.module_state_dict()
    target.load(path)
    after = target.engine.module_state_dict()
    return {
        "kept": {name for name in after if torch.equal(after[name], before[name])},
        "loaded": {name for name in after if torch.equal(after[name], expected[name])},
    }


@pytest.mark.parametrize("stage", [2, 3])
def test_frozen_parameters_may_be_left_out_and_stay_as_they_are(stage: int, tmp_path: Path) -> None:
    from shardwise.checkpoint import Checkpoint

    for result in on_ranks(frozen_left_out, 2, str(tmp_path), stage):
        assert set(FROZEN) <= result["kept"]
        assert {"embedding.weight", "temperature", "blocks.2.inner.weight"} <= result["loaded"]
    with Checkpoint(str(tmp_path / "global_step1")) as saved:
        assert saved.manifest.excluded == FROZEN
        assert "blocks.0.inner.bias" not in {t.name for t in saved.manifest.tensors}


def full_disk(path: str) -> tuple[str, list[str]]:
    import resource
    import signal

    run = Run(config(3), seed=1)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if torch.distributed.get_rank() == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limit[1]))
    try:
        with pytest.raises(CheckpointError) as caught:
            run.engine.save_16bit_model(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    torch.distributed.barrier()
    run.step()
    return str(caught.value), os.listdir(path)


def test_a_full_disk_while_writing_weights_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    (first, names), (second, _) = on_ranks(full_disk, 2, str(tmp_path))
    assert "File too large" in first
    assert "failed on rank 0" in second
    assert names == []
