"""Runs of the autotuner, from inside the script."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise
from shardwise.comm.environment import CONFIG_OVERRIDE
from shardwise.plan.candidates import ModelFacts
from tests.harness import run_ranks

ADAM = {"type": "AdamW", "params": {"lr": 1e-3}}


def trained(config: dict[str, Any], rows: int, steps: int = 10) -> int:
    """Train, and return the number of steps until the engine ends the process."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    engine, *_ = shardwise.initialize(model=model, config=config)
    try:
        for taken in range(steps):
            try:
                for _ in range(engine.gradient_accumulation_steps()):
                    engine.backward(engine(torch.randn(rows, 32)).square().mean())
                    engine.step()
            except SystemExit as end:
                assert end.code == 0
                return taken + 1
        return 0
    finally:
        engine.destroy()


def config(stage: int = 0, **autotuning: Any) -> dict[str, Any]:
    section = {"enabled": True, **autotuning}
    return {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage},
        "optimizer": ADAM,
        "autotuning": section,
    }


def test_a_run_measures_some_steps_and_ends(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    assert trained(config(metric_path=str(path), start_profile_step=2, end_profile_step=4), rows=4) == 4
    report = json.loads(path.read_text())
    assert report["throughput"] * report["latency"] == pytest.approx(16)
    assert report["rows"] == 4 and report["memory"] > 0
    assert report["built"]["gradient_accumulation_steps"] == 4 and report["built"]["zero_optimization"]["stage"] == 0


def test_without_the_launcher_the_section_changes_nothing() -> None:
    assert trained(config(), rows=4, steps=6) == 0


def test_the_first_run_plans_each_candidate(tmp_path: Path) -> None:
    section = {"model_info": {"profile": True}, "model_info_path": str(tmp_path / "facts.json")}
    assert run_ranks(trained, 2, config(stage=1, **section), 4) == [1, 1]
    facts = ModelFacts.read(json.loads((tmp_path / "facts.json").read_text()))
    assert (facts.num_params, facts.micro, facts.rows) == (32 * 64 * 2 + 96, 4, 4)
    assert facts.flops == 4 * (3 * 2 * 2 * 32 * 64 - 2 * 32 * 64)  # no gradient of the input
    assert not facts.notes and facts.config["optimizer"] == ADAM
    stages = {one.config["zero_optimization"]["stage"] for one in facts.candidates}
    assert stages == {0, 1, 2, 3} and all(one.memory for one in facts.candidates)
    for one in facts.candidates:
        assert 2 * one.micro * one.accumulation == one.config["train_batch_size"] == 16
    by = {one.name: one.memory or 0 for one in facts.candidates}
    assert by["z3_mbs4_gas2"] < by["z0_mbs4_gas2"]


def test_keys_of_a_file_replace_those_of_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.json"
    section = {"enabled": True, "metric_path": str(path), "start_profile_step": 2, "end_profile_step": 2}
    keys = {"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 2}, "autotuning": section}
    (tmp_path / "override.json").write_text(json.dumps(keys))
    monkeypatch.setenv(CONFIG_OVERRIDE, str(tmp_path / "override.json"))
    given = config()
    del given["autotuning"]
    assert trained(given, rows=8) == 2
    built = json.loads(path.read_text())["built"]
    assert (built["train_micro_batch_size_per_gpu"], built["zero_optimization"]["stage"]) == (8, 2)
    model = nn.Linear(8, 8)
    engine, *_ = shardwise.initialize(model=model, config={"train_batch_size": 4})  # trains nothing
    assert engine.train_batch_size() == 4
    engine.destroy()


def test_bounds_that_no_batch_meets_are_an_error(tmp_path: Path) -> None:
    section = {"model_info": {"profile": True}, "model_info_path": str(tmp_path / "facts.json")}
    with pytest.raises(shardwise.errors.UsageError, match="no micro-batch size from 20 to 30 divides the 16 samples"):
        trained(
            config(**section, min_train_micro_batch_size_per_gpu=20, max_train_micro_batch_size_per_gpu=30),
            rows=4,
        )
