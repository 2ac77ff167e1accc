"""Plain weights out of a sharded engine, and into one."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from shardwise.errors import CheckpointError, UsageError
from tests.checkpoint.job import FROZEN, Model, Run, as_ranks, config, on_ranks
from tests.harness import thorough
from tests.harness.logs import logged
from tests.harness.training import masters

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def export(path: str, stage: int, dtype: str) -> dict[str, Any]:
    run = Run(config(stage, dtype), seed=1)
    run.step()
    engine, accountant = run.engine, run.engine.accountant
    accountant.reset_peak()
    before = accountant.total
    assert engine.save_16bit_model(path) is True
    peak = accountant.peak_total - before
    assert engine.save_fp16_model(path, "trained.safetensors", exclude_frozen_parameters=True) is True
    engine.save_16bit_model(f"{path}/one", "pytorch_model.bin")
    engine.save_16bit_model(f"{path}/several", max_shard_size=500)
    engine.save_16bit_model(f"{path}/several", "plain.pt", max_shard_size="500B")
    with pytest.raises(CheckpointError, match="max_shard_size"):
        engine.save_16bit_model(path, max_shard_size="big")
    largest = max(unit.numel for unit in engine.sharded.units)
    state = engine.module_state_dict()
    run.step()
    return {"peak": peak, "largest": largest, "state": state}


@pytest.mark.parametrize(("stage", "dtype"), [thorough(0, "fp32"), (1, "bf16"), thorough(2, "fp32"), (3, "bf16")])
def test_plain_torch_loads_the_weights(stage: int, dtype: str, tmp_path: Path) -> None:
    results = on_ranks(export, 2, str(tmp_path), stage, dtype)
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


@as_ranks(2)
def test_trainers_get_the_state_dict_on_rank_0_and_may_add_it_to_another() -> None:
    engine = Run(config(3, "bf16"), seed=1).engine
    first = engine._zero3_consolidated_16bit_state_dict()
    second = engine._consolidated_16bit_state_dict(exclude_frozen_parameters=True)
    if torch.distributed.get_rank() == 0:
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
@as_ranks(2)
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


@as_ranks(2)
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
        assert any("the first is taken" in line for line in told.lines) is (not strict and dist.get_rank() == 0)
        assert torch.equal(before["head.weight"], engine.module_state_dict()["head.weight"]) is strict
    engine.load_module_state_dict({**missing, "more": torch.zeros(1)}, strict=False)
    assert torch.equal(engine.module_state_dict()["embedding.weight"], source["embedding.weight"])


@pytest.mark.parametrize("stage", [thorough(1), 3])
@as_ranks(2)
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
