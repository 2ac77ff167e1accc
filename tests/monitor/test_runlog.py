"""The run log of an engine: what is in its files, on each rank, and what becomes of training when they fail."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise
from shardwise.comm.environment import PROGRESS
from shardwise.config.export import MASK
from shardwise.report.rows import Row
from shardwise.runfiles import RUN, events_file, steps_file
from shardwise.utils.logging import logger
from tests.engine.test_tracing import BadGradient
from tests.harness import run_ranks
from tests.harness.logs import logged

Rows = list[dict[str, Any]]


def build(path: Path | str | None, **extra: Any) -> Any:
    torch.manual_seed(1)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3},
        "run_log": {"enabled": True, "path": None if path is None else str(path)} | extra.pop("run_log", {}),
    } | extra
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 1))
    return shardwise.initialize(model=model, config=config)[0]


def step(engine: Any, first: int = 0) -> float:
    loss = engine(torch.arange(first, first + 6).view(2, 3)).square().mean()
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def rows_of(path: Path) -> Rows:
    return [json.loads(line) for line in path.read_text().splitlines()]


def training(root: str) -> dict[str, Any]:
    rank = torch.distributed.get_rank()
    engine = build(root, gradient_accumulation_steps=2, comet={"api_key": "sesame"})
    before = {op: (each.count, each.size, each.sent) for op, each in engine.ledger.totals.items()}
    losses, norms, peaks = [], [], []
    for number in range(2):
        engine.accountant.reset_peak()
        losses.append(sum(step(engine, rank + micro) for micro in range(2)) / 2)
        norms.append(float(engine.get_global_grad_norm()))
        peaks.append(engine.accountant.peak_total)
        if number == rank:
            logger.warning("late by %d", rank, extra={"event": {"kind": "straggler", "step": 7, "advice": "look"}})
    totals = {
        op: [
            count - last
            for count, last in zip((each.count, each.size, each.sent), before.get(op, (0, 0, 0)), strict=True)
        ]
        for op, each in engine.ledger.totals.items()
    }
    engine.destroy()
    assert not any(type(handler).__name__ == "_Warnings" for handler in logger.handlers)
    logger.warning("after the end")
    return {"losses": losses, "norms": norms, "peaks": peaks, "totals": totals}


def test_every_rank_writes_its_steps_and_warnings(tmp_path: Path) -> None:
    known = run_ranks(training, 2, str(tmp_path / "run"))
    about = json.loads((tmp_path / "run" / RUN).read_text())
    assert (about["model"], about["parameters"], about["world"], about["stage"]) == ("Sequential", 61, 2, 3)
    assert about["batch"] == {"total": 8, "micro": 2, "accumulation": 2}
    assert about["configuration"]["comet"]["api_key"] == MASK
    assert "sesame" not in (tmp_path / "run" / RUN).read_text()
    assert about["plan"]["tiers"]["device"] > 0 and len(about["ranks"]) == 2
    for rank, told in enumerate(known):
        rows = rows_of(tmp_path / "run" / steps_file(rank))
        assert [(row["step"], row["samples"], row["lr"], row["applied"]) for row in rows] == [
            (1, 8, [0.1], True),
            (2, 16, [0.1], True),
        ]
        both = [sum(losses) / 2 for losses in zip(known[0]["losses"], known[1]["losses"], strict=True)]
        assert [row["loss"] for row in rows] == pytest.approx(both)
        assert [row["grad_norm"] for row in rows] == pytest.approx(told["norms"])
        assert [row["memory"]["device"]["peak"] for row in rows] == told["peaks"]
        for row in rows:
            held = row["memory"]["device"]
            assert sum(held["at_peak"].values()) == held["peak"] and held["peaks"]["optimizer state"] > 0
            assert set(row["phases"]) == {"forward", "backward", "step"}
            assert sum(row["phases"].values()) <= row["seconds"] and row["resident"] > 0
            assert row["tokens"] == 2 * 6 * 2  # of both ranks
            assert row["samples_per_second"] == pytest.approx(8 / row["seconds"], rel=1e-4)
        counted = {
            op: [sum(row["communication"].get(op, [0, 0, 0, 0.0])[place] for row in rows) for place in range(3)]
            for op in told["totals"]
        }
        assert counted == {op: totals for op, totals in told["totals"].items()}
        assert sum(row["communication"]["all_gather"][3] for row in rows) > 0
        assert any(unit.startswith(("0", "1", "2")) for row in rows for unit in row["units"])
        (event,) = rows_of(tmp_path / "run" / events_file(rank))
        assert event.pop("time") > 0
        assert event == {
            "step": 7,
            "kind": "straggler",
            "advice": "look",
            "rank": rank,
            "level": "warning",
            "text": f"late by {rank}",
        }


def test_a_timeline_goes_into_the_same_directory(tmp_path: Path) -> None:
    engine = build(tmp_path, timeline={"enabled": True, "start_step": 0, "steps": 1}, run_log={"plan": False})
    step(engine)
    engine.destroy()
    assert {path.name for path in tmp_path.iterdir()} >= {RUN, steps_file(0), "timeline-00000.json"}


def test_rows_of_several_steps_and_a_second_start(tmp_path: Path) -> None:
    for _ in range(2):
        engine = build(tmp_path, run_log={"every": 2, "plan": False})
        for _ in range(5):
            step(engine)
        engine.destroy()
    rows = rows_of(tmp_path / steps_file(0))
    assert [(row["step"], row["steps"]) for row in rows] == [(2, 2), (4, 2), (5, 1)] * 2
    assert rows[1]["communication"]["all_reduce"][0] == 2  # the norm of each step
    about = json.loads((tmp_path / RUN).read_text())
    assert about["plan"] is None and [start["step"] for start in about["starts"]] == [0, 0]


def test_rows_of_several_steps_have_the_loss_norm_and_skips_of_all(tmp_path: Path) -> None:
    """The first step has the largest norm; the third is skipped."""
    engine = build(tmp_path, run_log={"every": 2, "plan": False}, non_finite="skip")
    losses, norms = [], []
    for number in range(4):
        output = engine(torch.arange(number, number + 6).view(2, 3))
        if number == 2:
            output = BadGradient.apply(output, float("nan"))
        loss = output.square().mean() * (100.0 if number == 0 else 1.0)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
        norms.append(float(engine.last_step.grad_norm))
    engine.destroy()
    first, second = rows_of(tmp_path / steps_file(0))
    assert [first["loss"], second["loss"]] == pytest.approx([sum(losses[:2]) / 2, sum(losses[2:]) / 2])
    assert first["grad_norm"] == pytest.approx(norms[0]) and norms[0] > norms[1]
    assert second["grad_norm"] == "nan"
    assert [(row["applied"], row["skipped"], row["steps"]) for row in (first, second)] == [(True, 0, 2), (True, 1, 2)]
    found = Row.of(second)
    assert found is not None and found.skipped == 1


def test_what_is_moved_and_what_other_tiers_hold(tmp_path: Path) -> None:
    engine = build(
        tmp_path / "run",
        zero_optimization={
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "nvme", "nvme_path": str(tmp_path), "max_in_cpu": 0},
        },
    )
    step(engine)
    step(engine)
    engine.destroy()
    row = rows_of(tmp_path / "run" / steps_file(0))[1]
    assert row["memory"]["host"]["at_peak"]["optimizer state"] > 0 and row["memory"]["disk"]["peak"] > 0
    assert all(size > 0 for size in row["moved"]["disk"])


def test_a_file_system_that_fails_warns_once_and_training_goes_on(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with logged(logging.WARNING) as kept:
        engine = build(tmp_path / "run" / "inside", run_log={"plan": False})
        for _ in range(3):
            step(engine)
        engine.destroy()
    warnings = kept.lines
    assert engine.global_steps == 3
    assert sum("NotADirectoryError" in text and "run_log.enabled" in text for text in warnings) == 1
    assert sum("are lost" in text for text in warnings) == 1 and len(warnings) == 2


def test_progress_of_an_engine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Lines, where the launcher or the configuration ask for them."""
    off = {"run_log": {"enabled": False}}
    for told, section, expected in [
        ("", {}, False),
        ("auto", {}, "deepspeed" not in sys.modules),
        ("", {"mode": "auto"}, True),
        ("off", {"mode": "lines"}, False),
    ]:
        monkeypatch.setenv(PROGRESS, told)
        engine = build(None, progress=section | {"total_steps": 2}, **off)
        step(engine)
        step(engine)
        engine.destroy()
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("step ")]
        assert [line.split(" | ")[0] for line in lines] == (["step 1/2", "step 2/2"] if expected else [])
        assert all("loss " in line and "device " in line for line in lines)
        assert not expected or ("/step" in lines[1] and "tokens/s" in lines[1])
