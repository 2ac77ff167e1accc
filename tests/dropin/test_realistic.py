"""Configurations in the forms of public repositories of 2020 to 2026, read and started through the drop-in.

`realistic.json` has one row for each: the configuration and either the keys that are listed as having no effect, or the
keys because of which it is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from shardwise.config import accept, assume, resolve
from shardwise.errors import ConfigError
from shardwise.launch.cli import app

ROWS: list[dict[str, Any]] = json.loads((Path(__file__).parent / "realistic.json").read_text())
STARTED = [row for row in ROWS if "ignored" in row]


def named(rows: list[dict[str, Any]]) -> Any:
    return pytest.mark.parametrize("row", rows, ids=lambda row: row["name"])


@named(ROWS)
def test_a_configuration_is_read_or_refused(row: dict[str, Any]) -> None:
    try:
        facts, _ = assume(accept(row["config"]))
        found = resolve(accept(row["config"]), world_size=2, facts=facts)
    except ConfigError as error:
        assert sorted({problem.path for problem in error.problems}) == row.get("refused"), error
    else:
        assert sorted(note.path for note in found.ignored) == row.get("ignored")


@named(ROWS)
def test_check_agrees(row: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text(json.dumps(row["config"]))
    checked = CliRunner().invoke(app, ["check", str(path), "--world", "2", "--json"])
    found = json.loads(checked.stdout)
    assert found["ok"] is ("ignored" in row) and checked.exit_code == int("refused" in row)


@named(STARTED)
def test_an_engine_trains(
    row: dict[str, Any], installed: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import deepspeed

    monkeypatch.chdir(tmp_path)
    try:
        resolve(accept(row["config"]), world_size=1)
    except ConfigError as error:
        # Left to a trainer, or to more ranks than one.
        assert {problem.path for problem in error.problems} <= {
            "train_batch_size", "sequence_parallel_size", "tensor_parallel.autotp_size",
            "zero_optimization.mics_shard_size", "zero_optimization.zero_hpz_partition_size",
        }  # fmt: skip
        return
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    before = model.weight.detach().clone()
    given = "optimizer" in row["config"] and row["config"]["optimizer"] is not None
    optimizer = None if given else torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), optimizer=optimizer, config=row["config"]
    )
    try:
        dtype = next(model.parameters()).dtype
        for _ in range(2 * engine.gradient_accumulation_steps()):
            engine.backward(engine(torch.ones(2, 8, dtype=dtype)).float().mean())
            engine.step()
        assert engine.global_steps == 2
    finally:
        engine.destroy()
    assert engine.skipped_steps or not torch.equal(before, model.weight.float())
