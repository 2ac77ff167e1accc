"""The command line itself: what it refuses, and the commands that start nothing."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from shardwise._version import __version__
from shardwise.launch import cli
from tests.harness.tables import tables


def test_version_and_help(call, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["shardwise", "--version"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert not end.value.code and capsys.readouterr() == (f"shardwise {__version__}\n", "")
    code, shown, _ = call("run", "--help")
    assert code == 0
    for option in ("--nproc", "--num-gpus", "--hostfile", "--max-restarts", "--tag-output", "--device-limit"):
        assert option in shown


@pytest.mark.parametrize(("line", "expected", "words"), tables(__file__)["wrong"])
def test_wrong_command_lines(call, tmp_path, line: str, expected: int, words: str) -> None:
    """The option, file or name is in the message; DIR is a directory, FILE this file, NEAR has a similar name."""
    (tmp_path / "file").touch()
    places = {"DIR": str(tmp_path), "FILE": __file__, "NEAR": __file__.replace("cli", "clj")}
    given = [re.sub("DIR|FILE|NEAR", lambda found: places[found[0]], word) for word in line.split()]
    code, shown, error = call(*given)
    assert (code, shown) == (expected, "") and words.replace("DIR", str(tmp_path)) in error
    assert not (tmp_path / "out").exists()


def test_check_explains(call, tmp_path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"train_batch_size": 16, "gradient_accumulation_steps": 2}')
    code, shown, _ = call("check", str(config), "--world", "4")
    assert code == 0
    row = next(line for line in shown.splitlines() if line.lstrip().startswith("train_micro_batch_size_per_gpu"))
    assert " 2 " in row and "derived" in row
    assert shown.splitlines()[-1].endswith("config.json is valid for 4 ranks.")
    code, shown, _ = call("check", str(config), "--world", "4", "--effective")
    assert code == 0
    (tmp_path / "effective.json").write_text(shown)
    assert json.loads(call("check", str(tmp_path / "effective.json"), "--world", "4", "--effective")[1]) == json.loads(
        shown
    )
    code, shown, _ = call("check", str(config), "--world", "4", "--json")
    told = json.loads(shown)
    assert (code, told["ok"], told["world_size"]) == (0, True, 4)
    assert told["effective"]["train_micro_batch_size_per_gpu"] == 2
    assert {row["path"]: row["source"] for row in told["values"]}["train_batch_size"] == "given"


def test_check_stands_in_for_the_trainer(call, tmp_path) -> None:
    config = tmp_path / "config.json"
    schedule = {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": 2000}}
    batch = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}
    config.write_text(json.dumps({**batch, "scheduler": schedule}))
    code, shown, _ = call("check", str(config), "--world", "4")
    assert code == 0
    assumed = next(line for line in shown.splitlines() if line.startswith("assumed: train_micro_batch_size_per_gpu"))
    assert "filled by the client. Trainer: per_device_train_batch_size" in assumed
    assert assumed.endswith("1 sample for each rank is assumed here")
    told = json.loads(call("check", str(config), "--world", "4", "--json")[1])
    assert told["effective"]["train_batch_size"] == 4
    assert {note["path"]: note["value"] for note in told["assumed"]} == {
        "train_batch_size": None,
        "train_micro_batch_size_per_gpu": 1,
        "scheduler.params.total_num_steps": 2000,
    }
    config.write_text(json.dumps({"train_batch_size": 8}))
    assert json.loads(call("check", str(config), "--world", "4", "--json")[1])["assumed"] == []


def test_check_refuses(call, tmp_path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"train_batch_sise": 16}')
    code, shown, error = call("check", str(config))
    assert (code, shown) == (1, "")
    assert "train_batch_sise" in error and "train_batch_size" in error
    code, shown, _ = call("check", str(config), "--json")
    told = json.loads(shown)
    assert (code, told["ok"]) == (1, False)
    assert "train_batch_sise" in told["error"]
    assert call("check", str(tmp_path / "absent.json"))[0] == 1


def test_schema(call) -> None:
    code, shown, _ = call("schema")
    assert code == 0
    assert "train_batch_size" in json.loads(shown)["properties"]


def test_usage_errors_do_not_wait_for_torch(tmp_path) -> None:
    wrong = [
        "run --nproc 0 THIS",
        "run --include a:x THIS",
        "run --hostfile nope THIS",
        "run nope.py",
        "run",
        "check",
        "check nope.json",
        "inspect nope",
        "inspect nope --json",
        "export nope out",
        "import-deepspeed nope out",
    ]
    text = """
import sys
from shardwise.launch import cli
for line in sys.argv[2:]:
    try:
        cli.main(line.replace("THIS", sys.argv[1]).split())
    except SystemExit as end:
        print(line, end.code, "torch" in sys.modules, file=sys.stderr)
"""
    argv = [sys.executable, "-c", text, __file__, *wrong]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, cwd=tmp_path)
    told = [line for line in done.stderr.splitlines() if line.endswith(("True", "False"))]
    expected = [2, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1]
    assert told == [f"{line} {code} False" for line, code in zip(wrong, expected, strict=True)]


def test_only_a_like_name_is_proposed(call, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop.py").touch()
    assert call("run", "nope.py")[2] == f"shardwise: error: No such file nope.py in {tmp_path}.\n"
    assert call("run", "lop.py")[2].endswith(". Did you mean loop.py?\n")
