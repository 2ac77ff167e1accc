"""State of a pipeline: each public function gives or takes the whole model's values, on any number of stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch import nn

import shardwise
from shardwise.errors import CheckpointError, UsageError
from shardwise.pipe import LayerSpec
from shardwise.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)
from tests.harness import run_ranks, thorough
from tests.pipeline import families
from tests.pipeline.training import WIDTH, Setting, data, engine_of, layers, model_of


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


def written(setting: Setting, root: str) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Train, and write and return the weights in each way; return the state dict, and what was wrong."""
    engine = engine_of(setting)
    engine.train_batch(data(setting, 0))
    found = engine.module_state_dict()
    wrong = []
    first = engine._consolidated_16bit_state_dict()
    if dist.get_rank() != 0:
        wrong += [] if first is None else ["consolidated on another rank"]
    else:
        wrong += [f"consolidated {name}" for name in found if not torch.equal(first[name], found[name])]
    engine.save_16bit_model(f"{root}/16bit")
    engine.save_16bit_model(f"{root}/pickled", "weights.pt")
    engine.export(f"{root}/export", max_shard_size=700)
    engine.save_checkpoint(f"{root}/saved")
    engine.destroy()
    own = engine.module.state_dict()
    wrong += [f"module_state_dict {name}" for name in own if not torch.equal(own[name], found[name])]
    return found, wrong


@pytest.mark.parametrize(
    ("stages", "world", "zero", "dtype"),
    [(2, 4, 3, "fp32"), thorough(3, 6, 1, "bf16"), thorough(2, 4, 0, "bf16"), thorough(3, 6, 2, "fp32")],
)
def test_whole_weights_are_those_of_all_stages(stages: int, world: int, zero: int, dtype: str, tmp_path: Path) -> None:
    config = {} if dtype == "fp32" else {"bf16": {"enabled": True}, "data_types": {"buffer_dtype": "bf16"}}
    setting = Setting(stages, "interleaved" if stages == 2 else "1f1b", zero, made=with_buffers, config=config)
    runs = run_ranks(written, world, setting, str(tmp_path))
    found = runs[0][0]
    for other, wrong in runs:
        assert wrong == []
        assert other.keys() == found.keys() and all(torch.equal(other[name], found[name]) for name in found)
    whole = model_of(1, with_buffers)
    assert set(whole.state_dict()) == set(found)
    exported = plain_tensors(str(tmp_path / "export"))
    assert set(exported) == set(found) and len(list((tmp_path / "export").glob("*.safetensors"))) > 1
    for name, value in found.items():
        narrow = torch.bfloat16 if dtype == "bf16" and value.is_floating_point() else value.dtype
        assert value.dtype is narrow
        assert torch.equal(exported[name].to(narrow), value), name
        if dtype == "fp32":
            assert exported[name].dtype is value.dtype
    for file in (load_file(tmp_path / "16bit" / "model.safetensors"), torch.load(tmp_path / "pickled" / "weights.pt")):
        assert file.keys() == found.keys() and all(torch.equal(file[name], found[name]) for name in found)
    shardwise.checkpoint.export(tmp_path / "saved", tmp_path / "again")
    again = plain_tensors(str(tmp_path / "again"))
    assert again.keys() == exported.keys() and all(torch.equal(again[name], exported[name]) for name in again)


def loaded(setting: Setting, root: str) -> list[str]:
    """Load changed weights in each way; return what was wrong."""
    engine = engine_of(setting)
    engine.train_batch(data(setting, 0))
    original = load_file(f"{root}/weights.safetensors")
    given = {name: value + 1 for name, value in original.items()}
    wrong = []

    def compare(what: str, expected: dict[str, torch.Tensor]) -> None:
        found = engine.module_state_dict()
        wrong.extend(f"{what}: {name}" for name in expected if not torch.equal(found[name], expected[name]))

    def refused(what: str, words: str, call: Any) -> None:
        try:
            call()
        except (CheckpointError, UsageError) as error:
            wrong.extend([] if words in str(error) else [f"{what}: {error}"])
        else:
            wrong.append(f"{what}: taken")

    engine.load_module_state_dict(given)
    compare("load_module_state_dict", given)
    lacking = {name: value for name, value in given.items() if name != "layers.7.linear.weight"}
    refused("a name less", "missing: layers.7.linear.weight", lambda: engine.load_module_state_dict(lacking))
    more = {**given, "layers.99.weight": torch.ones(1)}
    refused("a name more", "not in the model: layers.99.weight", lambda: engine.load_module_state_dict(more))
    own = {f"layers.{dist.get_rank()}.weight": torch.ones(1)}
    refused("other names", "ranks give different names", lambda: engine.load_module_state_dict(own))
    compare("after refusals", given)
    matched = engine.load_weights(f"{root}/weights.safetensors")
    wrong += [] if matched == ([], []) else [str(matched)]
    compare("load_weights", original)
    matched = engine.load_weights(f"{root}/more.safetensors", strict=False)
    wrong += [] if matched.unexpected == ["layers.99.weight"] else [str(matched)]
    refused(
        "more in the files",
        "not in the model: layers.99.weight",
        lambda: engine.load_weights(f"{root}/more.safetensors"),
    )

    def fill(src: dict[str, torch.Tensor], dst: nn.Module) -> None:
        dst.load_state_dict({name: src[name] for name in dst.state_dict()})

    engine.load_module_state_dict(given, custom_load_fn=fill)
    compare("custom_load_fn", given)
    engine.train_batch(data(setting, 1))
    engine.destroy()
    return wrong


@pytest.mark.parametrize(("stages", "world", "zero"), [(2, 4, 3), thorough(3, 3, 0), thorough(3, 3, 2)])
def test_whole_weights_are_loaded(stages: int, world: int, zero: int, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    state = {name: value.clone() for name, value in model_of(1, with_buffers).state_dict().items()}
    save_file(state, tmp_path / "weights.safetensors")
    save_file({**state, "layers.99.weight": torch.ones(1)}, tmp_path / "more.safetensors")
    for wrong in run_ranks(loaded, world, Setting(stages, "1f1b", zero, made=with_buffers), str(tmp_path)):
        assert wrong == []


def single(setting: Setting) -> list[str]:
    """Read and write the state of each parameter of this rank's stages; return what was wrong."""
    engine = engine_of(setting)
    engine.train_batch(data(setting, 0))
    wrong = []
    whole = engine.module_state_dict()
    for name, parameter in engine.module.named_parameters():
        value, moment = safe_get_full_fp32_param(parameter), safe_get_full_optimizer_state(parameter, "exp_avg")
        assert value is not None and moment is not None
        wrong += [] if torch.equal(value, whole[name]) and moment.shape == value.shape else [name]
        safe_set_full_fp32_param(parameter, value + 1)
        safe_set_full_optimizer_state(parameter, moment + 2, "exp_avg")
        changed = safe_get_full_optimizer_state(parameter, "exp_avg")
        wrong += [] if changed is not None and torch.equal(changed, moment + 2) else [f"moment of {name}"]
    found = engine.module_state_dict()
    wrong += [f"set {name}" for name in found if not torch.equal(found[name], whole[name] + 1)]
    parameters = list(engine.module.parameters())
    with shardwise.zero.GatheredParameters(parameters, modifier_rank=dist.get_rank() // 2 * 2), torch.no_grad():
        for parameter in parameters:
            parameter.add_(1 if dist.get_rank() % 2 == 0 else 100)
    again = engine.module_state_dict()
    wrong += [f"gathered {name}" for name in again if not torch.equal(again[name], found[name] + 1)]
    engine.train_batch(data(setting, 1))
    engine.destroy()
    return wrong


@pytest.mark.parametrize("zero", [3, thorough(1)])
def test_state_of_single_parameters(zero: int) -> None:
    for wrong in run_ranks(single, 4, Setting(2, "1f1b", zero)):
        assert wrong == []


def exported(kind: str, stages: int, directory: str) -> dict[str, torch.Tensor]:
    case = families.Case(kind, stages)
    engine = families.engine_of(case)
    engine.train_batch(iter(families.batches(case, 0, 0)))
    engine.export(directory)
    found = engine.module_state_dict()
    engine.destroy()
    return found


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
