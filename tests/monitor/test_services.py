"""What services have been given is read back from where they keep it; those whose packages are missing are left out."""

from __future__ import annotations

import importlib
import math
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from shardwise.monitor import Event, Monitor
from tests.monitor.test_engine import build, step

Points = dict[str, list[tuple[int, float]]]

CUSTOM = [("Eval/accuracy", 0.25, 12), ("Eval/accuracy", 0.5, 4), ("Eval/accuracy", math.nan, 20)]
"""Events whose steps do not only go up, and a value that is no number."""


def trained(**sections: Any) -> Points:
    """Train three steps and write events besides; what there must be then."""
    engine = build(gradient_clipping=1.0, **sections)
    losses, norms = [], []
    for _ in range(3):
        losses.append(step(engine))
        norms.append(float(engine.get_global_grad_norm()))
    engine.monitor.write_events(CUSTOM)
    assert engine.monitor.flush(60)
    engine.monitor.close(60)
    engine.destroy()
    return {
        "Train/Samples/train_loss": list(zip((2, 4, 6), losses, strict=True)),
        "Train/Samples/grad_norm": list(zip((2, 4, 6), norms, strict=True)),
        "Train/Samples/lr": [(at, 0.1) for at in (2, 4, 6)],
        "Eval/accuracy": [(at, value) for _, value, at in CUSTOM],
    }


def check(found: Points, expected: Points) -> None:
    assert found.keys() == {*expected, "Train/Samples/step_time_ms", "Train/Samples/samples_per_second"}
    for name, points in expected.items():
        assert [at for at, _ in found[name]] == [at for at, _ in points], name
        assert [value for _, value in found[name]] == pytest.approx([v for _, v in points], nan_ok=True), name


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    expected = trained(tensorboard={"enabled": True, "output_path": str(tmp_path), "job_name": "run"})
    reader = EventAccumulator(str(tmp_path / "run"), purge_orphaned_data=False)
    reader.Reload()
    check({tag: [(e.step, e.value) for e in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}, expected)


def records(path: Path) -> Iterator[bytes]:
    """The records of a file of W&B's: LevelDB's log format, in blocks of 32 KiB behind a header of 7 bytes."""
    content, at, parts = path.read_bytes(), 7, b""
    assert content[:4] == b":W&B"
    while at + 7 <= len(content):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack("<HB", content[at + 4 : at + 7])
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def test_wandb_off_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    expected = trained(wandb={"enabled": True, "project": "mine", "group": "first"})
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    assert wandb.run is None  # the run was begun here, and has ended
    [path] = tmp_path.rglob("*.wandb")
    for _ in range(100):  # a process of W&B's writes the file, some time after the run has ended
        written = [Record.FromString(text) for text in records(path)]
        if any(record.HasField("exit") for record in written):
            break
        time.sleep(0.1)
    found: Points = {}
    for record in written:
        if record.HasField("run"):
            assert (record.run.project, record.run.run_group) == ("mine", "first")
        if record.HasField("history"):
            row = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            at = int(row["events/step"])
            for name, value in row.items():
                if "/" in name and name != "events/step":
                    found.setdefault(name, []).append((at, float(value.strip('"'))))
    check(found, expected)
    axes = {(record.metric.name, record.metric.step_metric) for record in written if record.HasField("metric")}
    assert ("Eval/accuracy", "events/step") in axes


def test_wandb_leaves_a_run_of_the_script_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(mode="offline", dir=str(tmp_path), project="theirs")
    try:
        monitor = Monitor(SimpleNamespace(wandb=SimpleNamespace(enabled=True, project="p", group=None, team=None)))
        monitor.write_events([("x", 1.0, 1)])
        monitor.close(60)
        assert wandb.run is run and run.summary["x"] == 1.0
        run.log({"theirs": 2})
    finally:
        run.finish()
    assert len(list(tmp_path.rglob("*.wandb"))) == 1


def test_wandb_begins_anew_when_the_run_of_another_engine_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    class Run:
        def __init__(self) -> None:
            self.rows: list[Any] = []

        def define_metric(self, name: str, step_metric: str) -> None:
            self.rows.append(name)

        def log(self, row: dict[str, Any]) -> None:
            if package.run is not self:
                raise RuntimeError("the run is finished")
            self.rows.append(row)

        def finish(self) -> None:
            package.run = None

    package: Any = ModuleType("wandb")

    def init(**_: Any) -> Run:
        package.run = Run()
        return package.run

    package.run, package.init = None, init
    monkeypatch.setitem(sys.modules, "wandb", package)
    monkeypatch.setitem(sys.modules, "shardwise.monitor.wandb", package)  # restored at the end
    del sys.modules["shardwise.monitor.wandb"]
    made = importlib.import_module("shardwise.monitor.wandb").WandB
    section = SimpleNamespace(project="p", group=None, team=None)
    first, second = made(section), made(section)
    for one in (first, second):
        one.open()
        one.log([Event("x", 1.0, 1, 12.0)])
    assert len(package.run.rows) == 4
    first.close()
    with pytest.raises(RuntimeError):
        second.log([Event("x", 2.0, 2, 12.0)])
    second.open()
    second.log([Event("x", 2.0, 2, 12.0)])
    assert package.run.rows == ["x", {"x": 2.0, "events/step": 2}]
    second.close()
    assert package.run is None


def test_mlflow_in_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # it is old, and needs no data base
    uri = (tmp_path / "runs").as_uri()
    section = {"enabled": True, "tracking_uri": uri, "experiment": "mine", "run_name": "first"}
    expected = trained(mlflow=section)
    client = MlflowClient(tracking_uri=uri)
    [run] = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    found = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    check({name: [(metric.step, metric.value) for metric in metrics] for name, metrics in found.items()}, expected)
    from shardwise.monitor.mlflow import MLflow, allowed

    service = MLflow(SimpleNamespace(**{**section, "experiment": "names"}))
    service.open()
    names = ["f1 (macro)", "../up", "a//b", "..", "\u00e4:%", "x" * 300]
    service.log([Event(name, 1.0, 1, 12.0) for name in names])
    [run] = client.search_runs([client.get_experiment_by_name("names").experiment_id])
    assert run.data.metrics.keys() == {allowed(name) for name in names}
    trained(mlflow=section)  # the experiment is there already
    assert len(client.search_runs([client.get_experiment_by_name("mine").experiment_id])) == 2


def test_comet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comet has nothing to read back without an account: its calls are looked at."""
    calls: list[Any] = []

    class Experiment:
        def __getattr__(self, name: str) -> Any:
            return lambda *args, **kwargs: calls.append((name, args, kwargs))

    def start(**kwargs: Any) -> Experiment:
        calls.append(("start", kwargs))
        return Experiment()

    package = ModuleType("comet_ml")
    package.start = start  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "comet_ml", package)
    monkeypatch.delitem(sys.modules, "shardwise.monitor.comet", raising=False)
    try:
        section = {"enabled": True, "samples_log_interval": 4, "online": False, "experiment_name": "first"}
        trained(comet={**section, "mode": "create", "api_key": "***"})  # as a shown configuration has it
    finally:
        sys.modules.pop("shardwise.monitor.comet", None)
    begun = {"api_key": None, "workspace": None, "project": None, "experiment_key": None}
    assert calls[0] == ("start", {**begun, "mode": "create", "online": False})
    assert calls[1] == ("set_name", ("first",), {}) and calls[-1][0] == "end"
    logged = [(args[0], kwargs["step"]) for name, args, kwargs in calls[2:-1] if name == "log_metric"]
    assert [at for name, at in logged if name == "Train/Samples/lr"] == [2, 6]
    assert [at for name, at in logged if name == "Eval/accuracy"] == [12, 4, 20]


def test_comet_off_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("comet_ml")
    importlib.import_module("shardwise.monitor.comet")
    monkeypatch.setenv("COMET_OFFLINE_DIRECTORY", str(tmp_path))
    trained(comet={"enabled": True, "samples_log_interval": 1, "online": False})
    assert list(tmp_path.rglob("*.zip"))
