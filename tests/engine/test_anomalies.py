"""Losses and gradient norms far above what they were: judged alike on all ranks, acted upon, and undone."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.config import resolve
from shardwise.engine.spikes import History
from shardwise.errors import AnomalyError, ConflictError, NonFiniteError
from tests.checkpoint.job import SAMPLES, Run, config, differences
from tests.checkpoint.test_copies import as_node
from tests.engine.late import late_reads
from tests.harness import on_ranks, run_ranks, thorough
from tests.harness.logs import logged

WATCH = {"enabled": True, "min_steps": 5, "window": 20, "threshold": 8.0}


def test_a_spike_is_told_from_noise_and_trend() -> None:
    draw = random.Random(3)
    history = History(window=50, threshold=8.0, least=20)
    for step in range(400):  # falls, and is noisy
        assert history.judge(step, 2.0 + 3.0 * 0.98**step + draw.gauss(0, 0.1)) is None
    usual, deviations = history.judge(400, 3.5) or (0.0, 0.0)
    assert 1.8 < usual < 2.2 and 8.0 < deviations < 30.0
    assert history.judge(401, 2.1) is None and history.judge(402, 0.1) is None  # a low loss is no trouble
    level = [history.judge(403 + n, 4.0 + draw.gauss(0, 0.1)) is not None for n in range(50)]
    assert level[0] and not level[-1]  # a new level becomes usual
    norms = History(window=50, threshold=8.0, least=5, factors=True)
    assert [norms.judge(step, 10.0 ** (-step / 40)) for step in range(100)] == [None] * 100
    constant = History(window=10, threshold=8.0, least=3)
    assert [constant.judge(step, value) for step, value in enumerate([1.0] * 6 + [1.05])] == [None] * 7
    assert constant.judge(7, 1.2) is not None


def one_step(run: Run, factor: float = 1.0, bad: float = 1.0) -> list[float]:
    """Train one window whose losses are multiplied, on rank 1 also by `bad`; return them."""
    losses = []
    for _ in range(2):
        loss = run.engine(next(run._batches)) * (factor * bad if dist.get_rank() == 1 else factor)
        run.engine.backward(loss)
        losses.append(float(loss.detach()))
        run.engine.step()
    return losses


def spiking(settings: dict[str, Any], late: bool, root: str) -> dict[str, Any]:
    """Train 8 steps, of which the seventh has losses 300 times as large; stop there if that is asked for."""
    seen: dict[str, Any] = {"own": [], "told": [], "applied": []}
    with logged() as kept, late_reads(late):
        run = Run(config(2, **settings), noise=False)
        engine = run.engine
        small = engine.ledger.totals["all_reduce"].count if "all_reduce" in engine.ledger.totals else 0
        for number in range(8):
            try:
                seen["own"].append(one_step(run, 300.0 if number == 6 else 1.0))
            except AnomalyError as error:
                seen["error"] = str(error)
                break
            seen["applied"].append(engine.was_step_applied())
            seen["told"].append(float(engine.last_step.loss))
        seen["small"] = engine.ledger.totals["all_reduce"].count - small
        engine.monitor.flush()
        seen["anomalies"] = [(one.kind, one.step, one.action, one.parameters) for one in engine.anomalies]
        seen["steps"] = [engine.global_steps, engine.skipped_steps]
        seen["norms"], seen["losses"] = engine.grad_norm_history, engine.loss_history
        engine.save_checkpoint(root)
        again = Run(config(2, **settings), seed=7, noise=False)
        again.load(root)
        state, other = engine._step.watch.state(), again.engine._step.watch.state()
        seen["same"] = sorted(state) == sorted(other) and all(torch.equal(state[key], other[key]) for key in state)
    seen["events"] = kept.events
    return seen


@pytest.mark.parametrize("action", [thorough("warn"), "skip", thorough("stop"), "late"])
def test_a_spike_is_acted_upon(action: str, tmp_path: Path) -> None:
    late = action == "late"
    asked = "warn" if late else action
    settings = {
        "anomaly_watch": {**WATCH, "loss_spike": asked, "grad_norm_spike": asked},
        "jsonl_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "run"},
    }
    first, second = run_ranks(spiking, 2, settings, late, str(tmp_path / "saved"))
    assert second["events"] == [] and first["same"] and second["same"]
    assert all(first[key] == second[key] for key in ("anomalies", "losses", "norms", "told"))
    assert [(kind, step, done) for kind, step, done, _ in first["anomalies"]] == [
        ("loss_spike", 6, asked),
        ("grad_norm_spike", 6, asked),
    ]
    assert all(len(names) == 3 for *_, names in first["anomalies"])
    event = json.loads(json.dumps(first["events"]))[0]
    assert event["kind"] == "loss_spike" and event["step"] == 6 and event["value"] > 50 * event["usual"]
    assert event["parameters"] == list(first["anomalies"][0][3]) and "learning rate" in event["advice"]
    if action == "stop":
        assert first["steps"] == [6, 0] and '`anomaly_watch.loss_spike` is "stop". Parameters' in first["error"]
        assert first["error"] == second["error"] and len(first["applied"]) == 6
        return
    assert first["steps"] == [8, int(action == "skip")]
    assert first["applied"] == [number != 6 or action != "skip" for number in range(8)]
    assert first["small"] == 8  # one all-reduce a step
    # The loss is that of the job, and the monitor has it and the spikes.
    means = [sum(mine + others) / 4 for mine, others in zip(first["own"], second["own"], strict=True)]
    assert first["told"] == pytest.approx(means, rel=1e-12)
    lines = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    written = [line["value"] for line in lines if line["name"] == "Train/Samples/train_loss"]
    assert written == first["told"]
    assert [line["name"] for line in lines if "spike" in line["name"]] == [
        "Train/Samples/loss_spike",
        "Train/Samples/grad_norm_spike",
    ]


def without_data(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name != "loader"}


def copying(stage: int, dtype: str, **more: Any) -> dict[str, Any]:
    return config(stage, dtype, checkpoint={"memory_copies": {"every": 4}}, **more)


def undone(root: str, stage: int, dtype: str, cause: str) -> list[str]:
    """Train, go wrong in the seventh step, and compare what follows with a run that is resumed from the same copy."""
    settings = copying(
        stage, dtype, **({"non_finite": "rewind"} if cause == "loss" else {"anomaly_watch": {**WATCH, cause: "rewind"}})
    )
    with as_node(root):
        first = Run(settings, seed=1)
    first.engine.resume(f"{root}/runs")
    for number in range(6):
        one_step(first)
        if number == 3:
            copied = first.fingerprint()
    assert differences(without_data(copied), without_data(first.fingerprint()))
    one_step(first, *((1.0, float("nan")) if cause == "loss" else (20.0, 1.0)))
    engine = first.engine
    wrong = [f"gone back: {name}" for name in differences(without_data(copied), without_data(first.fingerprint()))]
    position = engine.training_dataloader.state_dict()
    per_rank = SAMPLES // 2
    drawn = [at["epoch"] * per_rank + at["position"] for at in (copied["loader"], position)]
    if drawn[1] - drawn[0] != 3 * 6:  # three windows that are not seen again
        wrong.append(f"{position} after {copied['loader']}")
    if [one.kind for one in engine.anomalies][-1] != "rewind" or engine.last_step.applied:
        wrong.append(str(engine.anomalies))
    losses = [one_step(first) for _ in range(3)]
    expected = first.fingerprint()
    dist.barrier()
    with as_node(root):
        second = Run(settings, seed=9)
    assert second.engine.resume(f"{root}/runs") == {} and second.engine.resumed.source == "memory"
    second.engine.training_dataloader.load_state_dict(position)
    wrong += [f"loss {n}" for n in range(3) if one_step(second) != losses[n]]
    return wrong + [f"later: {name}" for name in differences(expected, second.fingerprint())]


@pytest.mark.parametrize(
    ("stage", "dtype", "cause"),
    [thorough(3, "bf16", "loss"), thorough(0, "fp32", "grad_norm_spike"), (2, "fp16", "loss_spike")],
)
def test_going_back_is_what_resuming_is(stage: int, dtype: str, cause: str, tmp_path: Path) -> None:
    assert run_ranks(undone, 2, str(tmp_path), stage, dtype, cause) == [[], []]


def too_often(root: str) -> list[Any]:
    """The same trouble after each rewind, and trouble before there is a copy."""
    settings = copying(1, "fp32", non_finite="rewind", anomaly_watch={"max_rewinds": 2})
    with as_node(f"{root}/a"):
        early = Run(settings)
    one_step(early)
    with pytest.raises(AnomalyError, match="no whole copy in memory to go back to yet: copies are made every 4 steps"):
        one_step(early, bad=float("nan"))
    with as_node(f"{root}/b"):
        run = Run(settings)
    for _ in range(4):
        one_step(run)
    seen = []
    for _ in range(2):
        one_step(run)
        one_step(run, bad=float("inf"))
        seen.append(run.engine.global_steps)
    one_step(run)
    with pytest.raises(NonFiniteError) as error:
        one_step(run, bad=float("inf"))
    one_step(run)  # who catches that can go on
    rewinds = run.engine._step.anomalies.rewinds  # of the process: what is brought back does not count it anew
    return [*seen, run.engine.global_steps, [one.kind for one in run.engine.anomalies], str(error.value), rewinds]


def test_rewinds_are_limited(tmp_path: Path) -> None:
    first, second = run_ranks(too_often, 2, str(tmp_path))
    assert first == second
    assert first[:4] == [4, 4, 6, ["non_finite", "rewind", "non_finite", "rewind", "non_finite"]]
    assert first[5] == 2
    assert "gradients are not finite: forward: the loss on rank 1 was not finite" in first[4]
    assert '`non_finite` is "rewind", which was done 2 times (`max_rewinds`) already' in first[4]


@on_ranks(2)
def test_only_copies_of_the_same_training_are_gone_back_to(tmp_path: Path) -> None:
    """Another engine has left its copies in the directory, or other values have been loaded since the copy."""
    settings = copying(1, "fp32", non_finite="rewind")
    with as_node(str(tmp_path)):
        first = Run(settings, seed=1, noise=False)
    first.engine.save_checkpoint(tmp_path / "runs", tag="a")
    values = first.engine.module_state_dict()
    one_step(first)
    first.engine.copy_to_memory()
    with as_node(str(tmp_path)):
        other = Run(settings, seed=9, noise=False)
    loads: list[Callable[[], Any]] = [
        lambda: first.engine.load_checkpoint(tmp_path / "runs"),
        lambda: first.engine.load_weights(tmp_path / "runs"),
        lambda: first.engine.load_module_state_dict(values),
    ]
    for load in [None, *loads]:
        run = other if load is None else first
        if load is not None:
            load()
        before = run.engine.module_state_dict()
        with pytest.raises(AnomalyError, match="no whole copy in memory to go back to"):
            one_step(run, bad=float("nan"))
        assert all(torch.equal(value, before[name]) for name, value in run.engine.module_state_dict().items())
        first.engine.copy_to_memory()


def test_settings_that_cannot_be_are_refused() -> None:
    for section, path in (
        ({"non_finite": "rewind"}, "non_finite"),
        ({"anomaly_watch": {"enabled": True, "loss_spike": "rewind"}}, "anomaly_watch.loss_spike"),
    ):
        with pytest.raises(ConflictError, match=f'{path}.*is "rewind", and there is nothing to go back to'):
            resolve({"train_batch_size": 2, **section})
        resolve({"train_batch_size": 2, **section, "checkpoint": {"memory_copies": {"every": 5}}})
    with pytest.raises(ConflictError, match=r"anomaly_watch.min_steps.*no value would be judged"):
        resolve({"train_batch_size": 2, "anomaly_watch": {"enabled": True, "window": 20}})
    unused = {"anomaly_watch": {"enabled": True, "trace": "always", "trace_steps": 5, "max_rewinds": 2}}
    notes = resolve({"train_batch_size": 2, **unused}).no_effect
    assert [note.path for note in notes] == ["anomaly_watch.trace_steps", "anomaly_watch.max_rewinds"]
    off = {"anomaly_watch": {"enabled": False, "threshold": 5.0}}
    assert [note.path for note in resolve({"train_batch_size": 2, **off}).no_effect] == ["anomaly_watch"]
