"""Weights go to Hugging Face's libraries and come from them: plain `from_pretrained` and `save_pretrained`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise
from shardwise.errors import CheckpointError
from tests.harness import on_ranks, run_ranks, thorough
from tests.hf.test_families import FAMILIES

transformers = pytest.importorskip("transformers")

CHOSEN = ("gpt2", "llama", "bert", "t5", "mixtral")


def settings(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "bf16": {"enabled": True},
    }


def there_and_back(path: str, stage: int) -> None:
    """Export an engine of each family, and load what `save_pretrained` of another seed has written."""
    for family in CHOSEN:
        torch.manual_seed(3)
        with shardwise.zero.Init(config_dict_or_path=settings(stage)):
            model = FAMILIES[family]()
        engine, *_ = shardwise.initialize(model=model, config=settings(stage))
        engine.export(f"{path}/{family}/out", max_shard_size="40KB")
        assert engine.load_weights(f"{path}/{family}/given") == ([], [])
        engine.export(f"{path}/{family}/again", dtype="float32")
        engine.destroy()


@pytest.mark.parametrize("stage", [thorough(1), 3])
def test_plain_transformers_loads_what_is_exported_and_gives_what_is_imported(stage: int, tmp_path: Path) -> None:
    given = {}
    for family in CHOSEN:
        torch.manual_seed(4)
        model = given[family] = FAMILIES[family]()
        model.save_pretrained(tmp_path / family / "given", max_shard_size="40KB", save_original_format=False)
    run_ranks(there_and_back, 2, str(tmp_path), stage)
    for family in CHOSEN:
        torch.manual_seed(3)
        expected = FAMILIES[family]()
        kind = type(expected)
        assert (tmp_path / family / "out" / "model.safetensors.index.json").exists()
        loaded, notes = kind.from_pretrained(tmp_path / family / "out", output_loading_info=True)
        said, wanted = loaded.config.to_dict(), expected.config.to_dict()
        for changed in ("_name_or_path", "architectures", "dtype", "transformers_version"):
            said.pop(changed, None), wanted.pop(changed, None)
        assert said == wanted and loaded.config.architectures == [kind.__name__] and loaded.dtype is torch.float32
        assert (tmp_path / family / "out" / "generation_config.json").exists() == expected.can_generate()
        assert not notes["missing_keys"] and not notes["unexpected_keys"] and not notes["mismatched_keys"], (
            family,
            notes,
        )
        values = loaded.state_dict()
        assert all(torch.equal(values[name], value) for name, value in expected.state_dict().items()), family
        loaded = kind.from_pretrained(tmp_path / family / "again", dtype="float32")
        values = loaded.state_dict()
        assert all(torch.equal(values[name], value) for name, value in given[family].state_dict().items()), family


def divided(path: str) -> None:
    """Export a model of which ranks share tensors, and what has no configuration of its own."""
    torch.manual_seed(3)
    model = FAMILIES["llama"]()
    model.generation_config.max_new_tokens = 7
    model.lm_head.weight.requires_grad_(False)
    config = {**settings(1), "tensor_parallel": {"autotp_size": 2}}
    engine, *_ = shardwise.initialize(model=model, config=config)
    engine.export(f"{path}/whole", dtype="bfloat16")
    engine.export(f"{path}/trained", exclude_frozen_parameters=True)
    engine.export(f"{path}/state", format="pt")
    model.generation_config.temperature, model.generation_config.do_sample = 0.5, False
    engine.export(f"{path}/strange")


def test_the_configuration_is_beside_whole_weights(tmp_path: Path) -> None:
    run_ranks(divided, 2, str(tmp_path))
    torch.manual_seed(3)
    expected = FAMILIES["llama"]()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    assert type(loaded) is type(expected) and loaded.dtype is torch.bfloat16
    assert loaded.generation_config.max_new_tokens == 7
    values = loaded.state_dict()
    for name, value in expected.state_dict().items():
        assert torch.equal(values[name], value.bfloat16()), name
    files = {each: sorted(path.name for path in (tmp_path / each).iterdir()) for each in ("trained", "state")}
    assert files == {"trained": ["model.safetensors"], "state": ["pytorch_model.bin"]}
    # What transformers refuses to write is left out.
    assert sorted(path.name for path in (tmp_path / "strange").iterdir()) == ["config.json", "model.safetensors"]


@on_ranks(1)
def test_weights_under_other_names_have_no_configuration(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model = peft.get_peft_model(FAMILIES["llama"](), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    engine, *_ = shardwise.initialize(model=model, config=settings(1))
    engine.export(str(tmp_path / "out"))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]


@on_ranks(2)
def test_a_configuration_that_cannot_be_written_is_told_before_anything_is(tmp_path: Path) -> None:
    model = FAMILIES["llama"]()
    engine, *_ = shardwise.initialize(model=model, config=settings(1))
    model.config.strange = object()
    with pytest.raises(CheckpointError, match="the model's config cannot be written by transformers: TypeError"):
        engine.export(str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
