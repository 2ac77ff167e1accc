"""`ds_io` and `ds_nvme_tune`: their options become a measurement, or are refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.errors import CommandLineError, NotBuiltError
from shardwise.launch.commands.bench import Wanted
from shardwise_deepspeed.disk import io_of, measure_one, tune, tune_of
from shardwise_deepspeed.entries import read

FOLDER = ("--folder", "/disk")
NVME = ("--nvme_dir", "/disk")


def test_options_of_ds_io() -> None:
    assert io_of([*FOLDER]) == Wanted("/disk", blocks=(1 << 20,), depths=(8,), threads=(1,), read=False)
    wanted = io_of(
        [
            *(*FOLDER, "--read", "--io_size", "400M", "--block_size", "8M", "--queue_depth", "32"),
            *("--io_parallel", "4", "--loops", "5", "--engine", "aio_basic", "--multi_process", "1"),
        ]
    )
    assert (wanted.size, wanted.blocks, wanted.depths, wanted.threads) == (400 << 20, (8 << 20,), (32,), (4,))
    assert (wanted.rounds, wanted.read, wanted.write) == (5, True, False)


def test_options_of_ds_nvme_tune(tmp_path: Path) -> None:
    assert tune_of([*NVME]) == Wanted("/disk")
    sweep = tmp_path / "sweep.json"
    sweep.write_text(json.dumps({"block_size": ["128K", 1048576], "queue_depth": [4, "16"], "io_parallel": [1, 2]}))
    logs = tmp_path / "a" / "logs"
    wanted = tune_of(
        [*NVME, "--sweep_config", str(sweep), "--no_write", "--io_size", "1G", "--loops", "2", "--log_dir", str(logs)]
    )
    assert (wanted.blocks, wanted.depths, wanted.threads) == ((128 << 10, 1 << 20), (4, 16), (1, 2))
    assert (wanted.size, wanted.rounds, wanted.read, wanted.write) == (1 << 30, 2, True, False)
    assert wanted.file == str(logs / "bench-io.json") and logs.is_dir()


OPTIONS = read("options.toml")


def words(command: str, option: str) -> list[str]:
    """Return an option with a value, if it takes one."""
    valued = f"{OPTIONS[command].get('values', '')} {OPTIONS[command].get('lists', '')}".split()
    return [f"--{option}", *(["1"] if option in valued else [])]


@pytest.mark.parametrize("option", OPTIONS["ds_io"]["without_effect"])
def test_options_without_effect(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert io_of([*FOLDER, *words("ds_io", option)]) == io_of([*FOLDER])
    shown = capsys.readouterr().out
    assert shown.startswith(f"--{option} changes nothing: ") and shown.count("\n") == 1


def test_what_changes_nothing_in_a_sweep_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for option in ("flush_page_cache", "verbose"):
        assert tune_of([*NVME, f"--{option}"]) == Wanted("/disk")
        assert capsys.readouterr().out.startswith(f"--{option} changes nothing: ")
    sweep = tmp_path / "sweep.json"
    sweep.write_text(json.dumps({"single_submit": [True, False], "sequential_requests": [False, True]}))
    assert tune_of([*NVME, "--sweep_config", str(sweep)]) == Wanted("/disk")
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("single_submit changes nothing") and shown[1].startswith("sequential_requests: true is")


REFUSED = [
    *(words("ds_io", option) for option in OPTIONS["ds_io"]["refused"]),
    ["--engine", "torch_io"],
    ["--multi_process", "2"],
]


@pytest.mark.parametrize("arguments", REFUSED)
def test_refused_options(arguments: list[str]) -> None:
    with pytest.raises(NotBuiltError, match=f"^{arguments[0]}"):
        io_of([*FOLDER, *arguments])


@pytest.mark.parametrize("option", OPTIONS["ds_nvme_tune"]["refused"])
def test_refused_options_of_a_sweep(option: str) -> None:
    with pytest.raises(NotBuiltError, match=f"^--{option}"):
        tune_of([*NVME, f"--{option}"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ("[]", "expected an object of lists"),
        ('{"block_size": "1M"}', 'block_size: expected a list, found "1M"'),
        ('{"queue_depth": [0]}', "queue_depth 0: give a number"),
        ('{"queue_depths": [1]}', "queue_depths is not known; expected block_size, queue_depth, io_parallel"),
    ],
)
def test_files_that_are_no_sweep(content: str, message: str, tmp_path: Path) -> None:
    sweep = tmp_path / "sweep.json"
    sweep.write_text(content)
    with pytest.raises(CommandLineError) as raised:
        tune_of([*NVME, "--sweep_config", str(sweep)])
    assert str(raised.value).startswith(f"--sweep_config {sweep}: ") and message in str(raised.value)
    sweep.write_text('{"use_gds": [true]}')
    with pytest.raises(NotBuiltError, match="GPU"):
        tune_of([*NVME, "--sweep_config", str(sweep)])
    with pytest.raises(CommandLineError, match="No such file"):
        tune_of([*NVME, "--sweep_config", str(tmp_path / "none")])


def test_errors_are_one_message(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for command, arguments, message, expected in (
        (measure_one, [], "ds_io: error: --folder is missing", 2),
        (measure_one, [*FOLDER, "--nope"], "ds_io: error: unrecognized arguments: --nope", 2),
        (measure_one, [*FOLDER, "--gpu"], "ds_io: error: --gpu", 1),
        (
            measure_one,
            ["--folder", str(tmp_path / "none")],
            f"ds_io: error: {tmp_path}/none: there is no such directory",
            2,
        ),
        (tune, [], "ds_nvme_tune: error: the following arguments are required: --nvme_dir", 2),
        (tune, ["--nvme_dir", str(tmp_path), "--io_size", "x"], "ds_nvme_tune: error: --io_size x", 2),
    ):
        with pytest.raises(SystemExit) as ended:
            command(arguments)
        assert ended.value.code == expected and capsys.readouterr().err.startswith(message)


def test_they_measure(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        measure_one(["--folder", str(tmp_path), "--io_size", "1M", "--block_size", "64K", "--loops", "1"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    assert json.loads(shown[shown.index("\n{") :]) == {
        "aio": {"block_size": 1 << 16, "queue_depth": 8, "intra_op_parallelism": 1}
    }
    sweep, logs = tmp_path / "sweep.json", tmp_path / "logs"
    sweep.write_text('{"block_size": ["64K"], "queue_depth": [1, 2], "io_parallel": [1]}')
    arguments = ["--nvme_dir", str(tmp_path), "--io_size", "1M", "--sweep_config", str(sweep), "--log_dir", str(logs)]
    with pytest.raises(SystemExit) as ended:
        tune([*arguments, "--loops", "1"])
    assert ended.value.code == 0
    assert len(json.loads((logs / "bench-io.json").read_text())["bytes_per_second"]) == 2
    assert {path.name for path in tmp_path.iterdir()} == {"sweep.json", "logs"}
