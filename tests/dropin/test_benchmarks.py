"""`ds_bench`, `ds_io` and `ds_nvme_tune`: their options become a measurement, or are refused with the reason."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwise import errors
from shardwise.errors import CommandLineError, NotBuiltError
from shardwise_deepspeed import communication
from shardwise_deepspeed.communication import bench_of
from shardwise_deepspeed.disk import io_of, measure_one, tune, tune_of
from shardwise_deepspeed.entries import read
from tests.harness.tables import tables

TABLES, OPTIONS = tables(__file__), read("options.toml")
COMMANDS: dict[str, tuple[Callable[[list[str]], Any], Callable[[list[str]], Any], str]] = {
    "ds_bench": (bench_of, communication.main, ""),
    "ds_io": (io_of, measure_one, "--folder /disk"),
    "ds_nvme_tune": (tune_of, tune, "--nvme_dir /disk"),
}
"""Command -> its measurement, its main function, and options without which it cannot be."""


def measurement(command: str, *options: str) -> dict[str, Any]:
    """Return what a command would measure, as JSON has it."""
    read, _, needed = COMMANDS[command]
    found: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(read([*needed.split(), *options]))))
    return found


def of_kind(kind: str) -> Iterator[tuple[str, str]]:
    """Yield command and option, with a value if it takes one, of the options of a kind."""
    for command in COMMANDS:
        table = OPTIONS[command]
        valued = f"{table.get('values', '')} {table.get('lists', '')}".split()
        for option in table.get(kind, ()):
            yield command, f"--{option} 1" if option in valued else f"--{option}"


def ended(command: str, options: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[Any, str, str]:
    """Run a command; return its exit code and what it prints."""
    with pytest.raises(SystemExit) as end:
        COMMANDS[command][1](options)
    shown = capsys.readouterr()
    return end.value.code, shown.out, shown.err


@pytest.mark.parametrize(("command", "options", "expected"), TABLES["options"])
def test_options(command: str, options: str, expected: dict[str, Any]) -> None:
    assert measurement(command, *options.split()).items() >= expected.items()


@pytest.mark.parametrize(("command", "option"), [*of_kind("without_effect")])
def test_options_without_effect(command: str, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert measurement(command, *option.split()) == measurement(command)
    shown = capsys.readouterr().out
    assert shown.startswith(f"{option.split()[0]} changes nothing: ") and shown.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "options", "error"),
    [*((command, option, "NotBuiltError") for command, option in of_kind("refused")), *TABLES["refused"]],
)
def test_options_that_are_refused(command: str, options: str, error: str) -> None:
    with pytest.raises(getattr(errors, error), match=options.split()[0]):
        measurement(command, *options.split())


def sweep(path: Path, content: str, *options: str) -> dict[str, Any]:
    """Return what `ds_nvme_tune` would measure with a file of settings."""
    path.write_text(content)
    return measurement("ds_nvme_tune", "--sweep_config", str(path), *options)


def test_a_sweep(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file, logs = tmp_path / "sweep.json", tmp_path / "a" / "logs"
    text = '{"block_size": ["128K", 1048576], "queue_depth": [4, "16"], "io_parallel": [1, 2]}'
    expected = {"blocks": [128 << 10, 1 << 20], "depths": [4, 16], "threads": [1, 2], "file": f"{logs}/bench-io.json"}
    assert sweep(file, text, "--log_dir", str(logs)).items() >= expected.items() and logs.is_dir()
    text = '{"single_submit": [true, false], "sequential_requests": [false, true]}'
    assert sweep(file, text) == measurement("ds_nvme_tune")
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("single_submit changes nothing") and shown[1].startswith("sequential_requests: true is")
    with pytest.raises(NotBuiltError, match="GPU"):
        sweep(file, '{"use_gds": [true]}')
    with pytest.raises(CommandLineError, match="No such file"):
        measurement("ds_nvme_tune", "--sweep_config", str(tmp_path / "none"))


@pytest.mark.parametrize(("content", "message"), TABLES["no sweep"])
def test_files_that_are_no_sweep(content: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(CommandLineError) as raised:
        sweep(tmp_path / "sweep.json", content)
    assert str(raised.value).startswith(f"--sweep_config {tmp_path}/sweep.json: ") and message in str(raised.value)


@pytest.mark.parametrize(("command", "options", "message", "code"), TABLES["errors"])
def test_errors_are_one_message(
    command: str, options: str, message: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    found, _, error = ended(command, options.split(), capsys)
    assert found == code and error.startswith(f"{command}: error: {message}")


def test_they_measure(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communication, "measure", lambda wanted: 1 if wanted.ops == ("broadcast",) else 0)
    assert ended("ds_bench", ["--broadcast"], capsys)[0] == 1
    size = ["--io_size", "1M", "--loops", "1"]
    code, shown, _ = ended("ds_io", ["--folder", str(tmp_path), *size, "--block_size", "64K"], capsys)
    aio = {"block_size": 1 << 16, "queue_depth": 8, "intra_op_parallelism": 1}
    assert code == 0 and json.loads(shown[shown.index("\n{") :]) == {"aio": aio}
    file, logs = tmp_path / "sweep.json", tmp_path / "logs"
    file.write_text('{"block_size": ["64K"], "queue_depth": [1, 2], "io_parallel": [1]}')
    options = ["--nvme_dir", str(tmp_path), *size, "--sweep_config", str(file), "--log_dir", str(logs)]
    assert ended("ds_nvme_tune", options, capsys)[0] == 0
    assert len(json.loads((logs / "bench-io.json").read_text())["bytes_per_second"]) == 2
    assert {path.name for path in tmp_path.iterdir()} == {"sweep.json", "logs"}
