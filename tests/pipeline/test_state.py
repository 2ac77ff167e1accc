"""State of a pipeline: each public function gives or takes the whole model's values, on any number of stages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import shardwise
from shardwise.checkpoint.safetensors_reader import TensorFile
from shardwise.errors import CheckpointError, UsageError
from shardwise.pipe import LayerSpec
from shardwise.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)
from tests.checkpoint.hostile import change_a_byte
from tests.checkpoint.job import first_rank
from tests.harness import on_ranks, run_ranks, thorough
from tests.pipeline import families
from tests.pipeline.training import WIDTH, Setting, data, engine_of, layers, model_of, whole_of


class Counting(nn.Module):
    """Has a parameter and two buffers, of which one is a tensor of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("offset", torch.arange(WIDTH) / 100)
        self.register_buffer("count", torch.tensor(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.offset


def with_buffers() -> list[Any]:
    """Return layers with buffers in the first and the last stage; the embedding is tied."""
    made = layers()
    return [*made[:2], LayerSpec(Counting), *made[2:-2], LayerSpec(Counting), *made[-2:]]


def plain_tensors(directory: str) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(Path(directory).glob("*.safetensors")):
        found |= load_file(file)
    return found


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def layout(stages: int, zero: int, dtype: str = "fp32") -> Setting:
    config = {} if dtype == "fp32" else {"bf16": {"enabled": True}, "data_types": {"buffer_dtype": "bf16"}}
    return Setting(stages, "interleaved" if stages == 2 else "1f1b", zero, made=with_buffers, config=config)


def written(setting: Setting, root: str) -> dict[str, torch.Tensor]:
    """Train, and write the weights in each way; return the state dict."""
    engine = engine_of(setting)
    engine.train_batch(data(setting, 0))
    found = engine.module_state_dict()
    first = engine._consolidated_16bit_state_dict()
    assert (first is None) == (dist.get_rank() != 0)
    if first is not None:
        same(first, found)
    engine.save_16bit_model(f"{root}/16bit")
    engine.save_16bit_model(f"{root}/pickled", "weights.pt")
    engine.export(f"{root}/export", max_shard_size=700)
    engine.save_checkpoint(f"{root}/saved")
    engine.destroy()
    own = engine.module.state_dict()
    same(own, {name: found[name] for name in own})
    return found


@pytest.mark.parametrize(
    ("stages", "world", "zero", "dtype"),
    [(2, 2, 3, "fp32"), thorough(3, 6, 1, "bf16"), thorough(2, 4, 0, "bf16"), thorough(3, 6, 2, "fp32")],
)
def test_whole_weights_are_those_of_all_stages(stages: int, world: int, zero: int, dtype: str, tmp_path: Path) -> None:
    found, *others = run_ranks(written, world, layout(stages, zero, dtype), str(tmp_path))
    for other in others:
        same(other, found)
    assert set(model_of(1, with_buffers).state_dict()) == set(found)
    exported = plain_tensors(str(tmp_path / "export"))
    assert len(list((tmp_path / "export").glob("*.safetensors"))) > 1
    same({name: value.to(found[name].dtype) for name, value in exported.items()}, found)
    for name, value in found.items():
        assert value.dtype is (
            torch.bfloat16 if dtype == "bf16" and value.is_floating_point() else exported[name].dtype
        )
    same(load_file(tmp_path / "16bit" / "model.safetensors"), found)
    same(torch.load(tmp_path / "pickled" / "weights.pt"), found)
    shardwise.checkpoint.export(tmp_path / "saved", tmp_path / "again")
    same(plain_tensors(str(tmp_path / "again")), exported)


@pytest.mark.parametrize(("stages", "world", "zero"), [(2, 4, 3), thorough(3, 3, 0), thorough(3, 3, 2)])
@on_ranks("world")
def test_whole_weights_are_loaded(stages: int, world: int, zero: int, tmp_path: Path) -> None:
    """Load changed weights in each way."""
    root, setting = str(tmp_path), replace(layout(stages, zero), schedule="1f1b")
    if dist.get_rank() == 0:
        state = {name: value.clone() for name, value in whole_of(setting).state_dict().items()}
        save_file(state, f"{root}/weights.safetensors")
        save_file({**state, "layers.99.weight": torch.ones(1)}, f"{root}/more.safetensors")
    engine = engine_of(setting)
    engine.train_batch(data(setting, 0))
    original = load_file(f"{root}/weights.safetensors")
    given = {name: value + 1 for name, value in original.items()}
    engine.load_module_state_dict(given)
    same(engine.module_state_dict(), given)
    lacking = {name: value for name, value in given.items() if name != "layers.7.linear.weight"}
    more = {**given, "layers.99.weight": torch.ones(1)}
    for wrong, words in (
        (lacking, "missing: layers.7.linear.weight"),
        (more, "not in the model: layers.99.weight"),
        ({f"layers.{dist.get_rank()}.weight": torch.ones(1)}, "ranks give different names"),
    ):
        with pytest.raises((CheckpointError, UsageError), match=words):
            engine.load_module_state_dict(wrong)
    same(engine.module_state_dict(), given)
    assert engine.load_weights(f"{root}/weights.safetensors") == ([], [])
    same(engine.module_state_dict(), original)
    assert engine.load_weights(f"{root}/more.safetensors", strict=False).unexpected == ["layers.99.weight"]
    with pytest.raises((CheckpointError, UsageError), match=r"not in the model: layers\.99\.weight"):
        engine.load_weights(f"{root}/more.safetensors")

    def fill(src: dict[str, torch.Tensor], dst: nn.Module) -> None:
        dst.load_state_dict({name: src[name] for name in dst.state_dict()})

    engine.load_module_state_dict(given, custom_load_fn=fill)
    same(engine.module_state_dict(), given)
    engine.train_batch(data(setting, 1))


@pytest.mark.parametrize("zero", [3, thorough(1)])
@on_ranks(4)
def test_state_of_single_parameters(zero: int) -> None:
    setting = Setting(2, "1f1b", zero)
    engine = engine_of(setting)
    engine.train_batch(data(setting, 0))
    whole = engine.module_state_dict()
    for name, parameter in engine.module.named_parameters():
        value, moment = safe_get_full_fp32_param(parameter), safe_get_full_optimizer_state(parameter, "exp_avg")
        assert value is not None and moment is not None
        assert torch.equal(value, whole[name]) and moment.shape == value.shape
        safe_set_full_fp32_param(parameter, value + 1)
        safe_set_full_optimizer_state(parameter, moment + 2, "exp_avg")
        changed = safe_get_full_optimizer_state(parameter, "exp_avg")
        assert changed is not None and torch.equal(changed, moment + 2), name
    found = engine.module_state_dict()
    same(found, {name: value + 1 for name, value in whole.items()})
    parameters = list(engine.module.parameters())
    with shardwise.zero.GatheredParameters(parameters, modifier_rank=dist.get_rank() // 2 * 2), torch.no_grad():
        for parameter in parameters:
            parameter.add_(1 if dist.get_rank() % 2 == 0 else 100)
    same(engine.module_state_dict(), {name: value + 1 for name, value in found.items()})
    engine.train_batch(data(setting, 1))


def exported(kind: str, stages: int, directory: str) -> dict[str, torch.Tensor]:
    setting = families.setting_of(kind, stages)
    engine = engine_of(setting)
    engine.train_batch(data(setting, 0))
    engine.export(directory)
    return engine.module_state_dict()


@pytest.mark.parametrize(("kind", "stages"), [("gpt2", 2), thorough("llama", 3), thorough("t5", 3)])
def test_a_pretrained_model_is_exported_for_from_pretrained(kind: str, stages: int, tmp_path: Path) -> None:
    found = run_ranks(exported, stages, kind, stages, str(tmp_path))[-1]
    auto = transformers.AutoModelForSeq2SeqLM if kind == "t5" else transformers.AutoModelForCausalLM
    model = auto.from_pretrained(tmp_path)
    assert type(model) is type(families.model_of(kind))
    state = model.state_dict()
    assert found.keys() == state.keys()
    for name, value in state.items():
        assert torch.equal(value, found[name]), name


@on_ranks(2)
def test_damage_that_one_stage_reads_is_refused_by_all_in_a_load_of_weights(tmp_path: Path) -> None:
    setting = replace(layout(2, 1), schedule="1f1b")
    engine = engine_of(setting)
    engine.save_checkpoint(tmp_path, "a")
    engine.train_batch(data(setting, 0))
    before, damaged = engine.module_state_dict(), set()
    for path in sorted((tmp_path / "a").glob("*.safetensors")):
        with TensorFile(str(path)) as file:
            places = {
                name: file.span(name)[0] for name in file.specs if "weight" in name and name.startswith("parameter/")
            }
        for name, place in sorted(places.items())[::4]:
            first_rank(change_a_byte, path, place)
            with pytest.raises(CheckpointError, match="damaged"):
                engine.load_checkpoint(tmp_path, "a", load_module_only=True)
            first_rank(change_a_byte, path, place)
            damaged.add(name.split("/")[1].split("[")[0])
    same(engine.module_state_dict(), before)
    own = {name for name, _ in engine.module.named_parameters()}
    assert damaged - own and damaged & own, (damaged, own)
