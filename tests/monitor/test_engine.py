"""What an engine writes: which events, on which rank, and what becomes of them when a service or the process fails."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise
from shardwise.errors import ConfigError, UsageError
from shardwise.monitor import Event, Service, registry
from tests.harness import of_all_ranks, on_ranks, thorough

Series = dict[str, list[tuple[int, float]]]


def section(directory: Path | str) -> dict[str, Any]:
    return {"enabled": True, "output_path": str(directory), "job_name": "run"}


def build(**extra: Any) -> Any:
    torch.manual_seed(1)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    } | extra
    return shardwise.initialize(model=nn.Linear(3, 1), config=config)[0]


def step(engine: Any, value: float = 1.0, **kwargs: Any) -> float:
    loss = engine(torch.full((2, 3), value, dtype=engine.module.weight.dtype)).float().square().mean()
    engine.backward(loss, **kwargs)
    engine.step()
    return float(loss.detach())


def read(directory: Path | str) -> Series:
    """The series of the CSV files and those of the JSON lines, which are the same."""
    found: Series = {}
    for path in Path(directory, "run").glob("*.csv"):
        with open(path, newline="", encoding="utf-8") as file:
            rows = list(csv.reader(file))
        assert rows[0][0] == "step" and path.stem.endswith(f"_{rows[0][1]}")
        found[path.stem] = [(int(at), float(value)) for at, value in rows[1:]]
    lines: Series = {}
    for text in Path(directory, "run", "events.jsonl").read_text().splitlines():
        line = json.loads(text)
        lines.setdefault(line["name"].replace("/", "_"), []).append((line["step"], float(line["value"])))
    assert {name: repr(series) for name, series in found.items()} == {n: repr(series) for n, series in lines.items()}
    return found


@on_ranks(2)
def test_the_first_rank_writes_each_step_over_the_samples_of_all(tmp_path: Path) -> None:
    """Two steps of two micro-batches, of which the second rank has other data."""
    rank, sections = (
        torch.distributed.get_rank(),
        {"csv_monitor": section(tmp_path), "jsonl_monitor": section(tmp_path)},
    )
    engine = build(**sections, gradient_accumulation_steps=2, gradient_clipping=1.0)
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("shardwise-monitor")]
    assert bool(threads) == (rank == 0)
    seen = []
    for number in range(2):
        losses = [step(engine, 1.0 + rank + number + micro) for micro in range(2)]
        seen.append((sum(losses) / 2, float(engine.get_global_grad_norm())))
    engine.monitor.write_events([("Eval/perplexity", torch.tensor(3.5), 7)])
    assert engine.monitor.enabled and engine.monitor.writes == (rank == 0)
    both = of_all_ranks(seen)
    engine.destroy()
    if rank:
        return
    found = read(tmp_path)
    times = [found.pop(f"Train_Samples_{name}") for name in ("step_time_ms", "samples_per_second")]
    assert [[at for at, _ in series] for series in times] == [[16], [16]]
    assert times[0][0][1] * times[1][0][1] == pytest.approx(8 * 1000)
    assert found.pop("Train_Samples_lr") == [(8, 0.1), (16, 0.1)]
    assert found.pop("Eval_perplexity") == [(7, 3.5)]
    for column, name in enumerate(["train_loss", "grad_norm"]):
        series = found.pop(f"Train_Samples_{name}")
        assert [at for at, _ in series] == [8, 16]
        means = [(own[column] + other[column]) / 2 for own, other in zip(*both, strict=True)]
        assert [value for _, value in series] == pytest.approx(means)
    assert not found


def test_the_loss_is_weighted_as_the_script_weighs_it(tmp_path: Path) -> None:
    engine = build(csv_monitor=section(tmp_path), jsonl_monitor=section(tmp_path), gradient_accumulation_steps=2)
    expected = []
    losses = [step(engine, 1.0, weight=3), step(engine, 2.0, weight=torch.tensor(1.0))]
    expected.append((3 * losses[0] + losses[1]) / 4)
    losses = [step(engine, 1.0, scale_wrt_gas=False), step(engine, 2.0)]
    expected.append((2 * losses[0] + losses[1]) / 2)
    step(engine, float("inf"), weight=0)  # the mean over no tokens
    expected.append(step(engine, 2.0, weight=5))
    engine.backward(engine(torch.ones(2, 3)).mean())
    engine.zero_grad()  # the window begins anew
    expected.append(sum(step(engine) for _ in range(2)) / 2)
    for _ in range(2):  # a loss that the engine does not see
        engine(torch.ones(2, 3)).mean().backward()
        engine.step()
    engine.destroy()
    assert [value for _, value in read(tmp_path)["Train_Samples_train_loss"]] == pytest.approx(expected)


def test_groups_scale_and_skipped_steps(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = nn.Linear(3, 1)
    groups = [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.01}]
    engine, *_ = shardwise.initialize(
        model=model,
        optimizer=torch.optim.SGD(groups),
        config={
            "train_batch_size": 2,
            "fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1},
            "csv_monitor": section(tmp_path),
            "jsonl_monitor": section(tmp_path),
        },
    )
    step(engine)
    step(engine, float("inf"))
    step(engine)
    engine.destroy()
    found = read(tmp_path)
    assert found["Train_Samples_loss_scale"] == [(2, 16.0), (4, 16.0), (6, 8.0)]
    assert found["Train_Samples_lr_1"] == [(at, 0.01) for at in (2, 4, 6)]
    assert found["Train_Samples_lr"] == [(at, 0.1) for at in (2, 4, 6)]


class Hanging(Service):
    """Hangs for a minute whatever is asked of it."""

    def __init__(self, section: Any) -> None:
        self.calls = 0

    def open(self) -> None:
        time.sleep(60)

    def log(self, events: Sequence[Event]) -> None:
        raise AssertionError


class Raising(Hanging):
    """Raises whatever is asked of it."""

    def open(self) -> None:
        raise ConnectionError("no route to host")


@pytest.mark.parametrize("kind", [Hanging, Raising])
def test_a_service_that_is_down_does_not_slow_training(
    kind: type[Service], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry.SERVICES, "comet", registry.Known(f"{__name__}:{kind.__name__}"))
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    engine = build(csv_monitor=section(tmp_path), jsonl_monitor=section(tmp_path), comet={"enabled": True})
    begun = time.monotonic()
    for _ in range(50):
        step(engine)
    assert time.monotonic() - begun < 10  # usually a tenth of a second
    assert not engine.monitor.flush(0.5)
    assert len(read(tmp_path)["Train_Samples_lr"]) == 50  # the other services have had theirs
    engine.monitor.close(0.5)
    engine.destroy()


ENDING = """
import os, signal, sys, time, torch, shardwise
root, how = sys.argv[1:]
files = {"enabled": True, "output_path": root, "job_name": "run"}
engine, *_ = shardwise.initialize(
    model=torch.nn.Linear(3, 1),
    config={
        "train_batch_size": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "csv_monitor": files,
        "jsonl_monitor": files,
    },
)
for number in range(100):
    engine.backward(engine(torch.ones(2, 3)).square().mean())
    engine.step()
    if number == 49 and how != "raises":
        assert engine.monitor.flush()
        print(engine.global_samples, flush=True)
if how == "raises":
    raise SystemError("of the script")
if how == "exits":
    os._exit(3)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(("how", "code"), [("is killed", -signal.SIGKILL), thorough("raises", 1), thorough("exits", 3)])
def test_a_crash_loses_nothing_that_was_written(how: str, code: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDING, str(tmp_path), how], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == code, done.stderr
    files = {path.name: path.read_text() for path in Path(tmp_path, "run").iterdir()}
    assert all(text.endswith("\n") for text in files.values())
    assert json.loads(files["events.jsonl"].splitlines()[-1])["step"] >= (200 if how == "raises" else 100)
    steps = [int(row[0]) for row in list(csv.reader(files["Train_Samples_lr.csv"].splitlines()))[1:]]
    assert len(steps) >= (100 if how == "raises" else 50) and steps == list(range(2, 2 * len(steps) + 1, 2))


def test_packages_that_are_missing_or_broken_are_named_before_anything_is_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "brokenmonitor.py").write_text("raise OSError('libfoo.so is missing')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(registry.SERVICES, "comet", registry.Known("nowhere:Comet", "brokenmonitor", "comet_ml"))
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r'wandb.enabled: .* `pip install "shardwise\[wandb\]"`'):
        build(wandb={"enabled": True})
    with pytest.raises(ConfigError, match=r'"comet_ml" is installed and cannot be imported \(OSError: libfoo.so'):
        build(comet={"enabled": True})


def test_a_directory_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    engine = build(csv_monitor=section(tmp_path))
    step(engine)
    engine.destroy()
    assert (tmp_path / "run").read_text() == "a file"


def test_names_of_the_drop_in(tmp_path: Path) -> None:
    from shardwise_deepspeed import monitors

    config = monitors.get_monitor_config({"csv_monitor": section(tmp_path), "train_batch_size": 8})
    master = monitors.MonitorMaster(config)
    assert master.enabled and master.csv_monitor.enabled and not master.tb_monitor.enabled
    master.write_events(iter([("a/b", 1.0, 3)]))
    with pytest.raises(UsageError):
        master.write_events([("a/b", "c", 3)])
    master.csv_monitor._writer.close()
    assert (tmp_path / "run" / "a_b.csv").read_text() == "step,b\n3,1.0\n"

    class Mine(monitors.Monitor):
        def __init__(self, monitor_config: Any) -> None:
            super().__init__(monitor_config)

        def write_events(self, event_list: Any) -> None:
            raise NotImplementedError

    assert Mine(3).monitor_config == 3


def test_times_of_the_parts_are_events_where_they_are_printed(tmp_path: Path) -> None:
    shared = {"csv_monitor": section(tmp_path), "jsonl_monitor": section(tmp_path)}
    engine = build(**shared, wall_clock_breakdown=True, steps_per_print=2)
    for _ in range(5):
        step(engine)
    engine.destroy()
    found = read(tmp_path)
    parts = ("forward", "backward", "backward_inner", "backward_allreduce", "step")
    series = {part: found[f"Train_Samples_elapsed_time_ms_{part}"] for part in parts}
    assert all([at for at, _ in values] == [4, 8] for values in series.values())
    for number in range(2):
        forward, backward, inner, reduction, update = (series[part][number][1] for part in parts)
        assert min(forward, inner, update) > 0 and backward == pytest.approx(inner + reduction)
