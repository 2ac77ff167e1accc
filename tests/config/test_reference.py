"""The documentation's table of keys is that of the schema, and its examples say what the code says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from shardwise.config import resolve
from shardwise.config.schema.gradients import METHODS
from shardwise.config.schema.optimizers import NATIVE_OPTIMIZERS, AdamWArguments
from shardwise.config.schema.schedules import NATIVE_SCHEDULES
from shardwise.config.schema.tables import documented
from shardwise.config.schema.tables import table as unsupported
from shardwise.config.schema_index import walk
from shardwise.errors import BatchSizeError, ConfigError
from tests.config.reference import PAGE as KEYS
from tests.config.reference import table

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_page_is_up_to_date() -> None:
    KEYS.check()


def test_every_key_has_a_row() -> None:
    rows = [line for line in table().splitlines() if line.startswith("| `")]
    listed = sum(len(block.partition("```")[0].split("\n")) - 2 for block in table().split("```text")[1:])
    models = {*METHODS.values(), *NATIVE_OPTIMIZERS.values(), *NATIVE_SCHEDULES.values()} - {AdamWArguments}
    parameters = sum(len(model.model_fields) for model in models)
    unchecked = sum("<name>" in row for section in unsupported()["keys"] for row in documented(section))
    assert len(rows) + listed - unchecked == sum(key.kind != "section" for _, key in walk()) + parameters
    assert all(len(re.split(r"(?<!\\)\|", row)) == 5 for row in rows)


def test_page_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a line"):
        KEYS.update("nothing here")


def test_the_first_example_works() -> None:
    example = re.search(r"```json\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert example is not None
    config = resolve(json.loads(example.group(1)), world_size=8).config
    assert config.gradient_accumulation_steps == 2


def test_the_printed_errors_are_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = PAGE.read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    file = Path("ds_config.json")
    file.write_text(
        '{\n "train_batch_size": 8,\n "gradient_clipp1ng": 1.0,\n "overlap_comm": true,\n'
        ' "fp16": {"enabled": "maybe"},\n "optimizer": {\n  "type": "AdamW",\n  "params": {"lrr": 1}}\n}'
    )
    with pytest.raises(ConfigError) as caught:
        resolve("ds_config.json")
    assert str(caught.value) in text
    monkeypatch.setenv("WORLD_SIZE", "4")
    file.write_text('{"train_batch_size": 32,\n"train_micro_batch_size_per_gpu": 4,\n"gradient_accumulation_steps": 4}')
    with pytest.raises(BatchSizeError) as batch:
        resolve("ds_config.json", world_size=4)
    assert " ".join(str(batch.value).removeprefix("in ds_config.json: ").split()) in " ".join(text.split())
