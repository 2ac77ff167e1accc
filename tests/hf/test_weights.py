"""Weights go to Hugging Face's libraries and come from them: plain `from_pretrained` and `save_pretrained`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise
from tests.harness import run_ranks
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
        if torch.distributed.get_rank() == 0:
            model.config.save_pretrained(f"{path}/{family}/out")
        assert engine.load_weights(f"{path}/{family}/given") == ([], [])
        engine.export(f"{path}/{family}/again", dtype="float32")
        engine.destroy()


@pytest.mark.parametrize("stage", [1, 3])
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
        loaded, notes = kind.from_pretrained(tmp_path / family / "out", dtype="float32", output_loading_info=True)
        assert not notes["missing_keys"] and not notes["unexpected_keys"] and not notes["mismatched_keys"], (
            family,
            notes,
        )
        values = loaded.state_dict()
        assert all(torch.equal(values[name], value) for name, value in expected.state_dict().items()), family
        expected.config.save_pretrained(tmp_path / family / "again")
        loaded = kind.from_pretrained(tmp_path / family / "again", dtype="float32")
        values = loaded.state_dict()
        assert all(torch.equal(values[name], value) for name, value in given[family].state_dict().items()), family
