"""The command line itself: what it refuses, and the commands that start nothing."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from shardwise._version import __version__
from shardwise.launch import cli


def test_version_and_help(call, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["shardwise", "--version"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert not end.value.code and capsys.readouterr() == (f"shardwise {__version__}\n", "")
    code, shown, _ = call("run", "--help")
    assert code == 0
    for option in ("--nproc", "--num-gpus", "--hostfile", "--max-restarts", "--tag-output", "--device-limit"):
        assert option in shown


PLAN, OWN, EXPORT = (
    ["plan", "tests.launch.test_plan:stages"],
    "tests.launch.test_profile:own",
    ["export", "DIR", "DIR/out"],
)
COMM, IO = ["bench", "comm"], ["bench", "io"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["run", "--nproc", "two", __file__], "--nproc"),
        (["run", "--nope", __file__], "--nope"),
        (["run", "--nproc", "0", __file__], "--nproc 0"),
        (["run", "-i", "localhost:0", "-e", "localhost:1", __file__], "cannot be combined"),
        (["run", "--num_gpus", "1", "-i", "localhost:0", __file__], "--include"),
        (["run", "--num_accelerators=1", "-e", "localhost:0", __file__], "--exclude"),
        (["run", __file__.replace("test_cli", "test_clj")], "Did you mean"),
        (["run", "-H", "/nonexistent", __file__], "/nonexistent"),
        (["run", "--tag-output", "x", __file__], "auto, always or never"),
        (["check", __file__, "--world", "0"], "--world 0"),
        ([*PLAN, "--pp", "0"], "--pp"),
        (["plan", "bloom-560m", "--schedule", "gpipe"], "--schedule"),
        (["plan", "gpt-9"], "bloom-560m"),
        (["plan", "nowhere:model"], "nowhere:model"),
        (["plan", "builtins:dict"], "torch.nn.Module"),
        (["plan", "torch.nn:Linear"], "torch.nn:Linear()"),
        (["plan", "bloom-560m", "--stages", "4"], "--stages 4"),
        (["plan", "bloom-560m", "--precision", "int8"], "--precision int8"),
        (["plan", "bloom-560m", "--host-limit", "much"], "--host-limit much"),
        (["plan", "bloom-560m", "--disk-speed", "3"], "--disk-speed 3"),
        (["plan", "bloom-560m", "--ranks", "0"], "--ranks"),
        (["profile", "nonsense"], "nonsense"),
        (["profile", "tests.launch.test_profile:of_pictures"], "Conv2d raises RuntimeError"),
        (["profile", OWN, "--length", "0"], "--length"),
        (["profile", OWN, "--depth", "-2"], "--depth"),
        ([*IO, "--dir", "DIR/none"], "DIR/none"),
        ([*IO, "--dir", "DIR/file"], "DIR/file"),
        ([*IO, "--size", "many"], "--size many"),
        ([*IO, "--size", "0"], "--size 0"),
        ([*IO, "--size", "4000P"], "--size 4000P"),
        ([*IO, "--size", "4000T", "--dir", "DIR"], "DIR: "),
        ([*IO, "--size", "64K", "--dir", "DIR"], "a request of 4194304 bytes"),
        ([*IO, "--block-size", "1M,x"], "--block-size x"),
        ([*IO, "--queue-depth", "0"], "--queue-depth 0"),
        ([*IO, "--threads", "-1"], "--threads -1"),
        ([*IO, "--rounds", "0"], "--rounds 0"),
        ([*IO, "--no-read", "--no-write"], "nothing is left"),
        ([*IO, "--json", "DIR/none/x.json"], "--json DIR/none/x.json"),
        ([*COMM, "--nproc", "1"], "--nproc 1"),
        ([*COMM, "--nproc", "0"], "--nproc 0"),
        ([*COMM, "--ops", "all_reduce,gossip"], "--ops gossip"),
        ([*COMM, "--dtype", "int8"], "--dtype int8"),
        ([*COMM, "--sizes", "1M,much"], "--sizes much"),
        ([*COMM, "--minsize", "1M", "--maxsize", "1K"], "--minsize 1M"),
        ([*COMM, "--maxsize", "4000T"], "on each of 2 ranks"),
        ([*COMM, "--trials", "0"], "--trials 0"),
        ([*COMM, "--unit", "furlongs"], "--unit furlongs"),
        ([*COMM, "--json", "/nowhere/x.json"], "--json /nowhere/x.json"),
        ([*COMM, "--hostfile", "/nowhere/hosts"], "/nowhere/hosts"),
        ([*EXPORT, "--format", "onnx"], "--format"),
        ([*EXPORT, "--dtype", "int4"], "--dtype"),
        ([*EXPORT, "--max-shard-size", "much"], "--max-shard-size"),
        ([*EXPORT, "--config", "/nonexistent"], "--config /nonexistent"),
        ([*EXPORT, "--config", __file__], "not JSON"),
        ([*EXPORT, "--nope"], "--nope"),
    ],
)
def test_wrong_command_lines_exit_with_2(call, tmp_path, args: list[str], words: str) -> None:
    """The option, file or name is in the message."""
    (tmp_path / "file").touch()
    code, shown, error = call(*(arg.replace("DIR", str(tmp_path)) for arg in args))
    assert (code, shown) == (2, "")
    assert words.replace("DIR", str(tmp_path)) in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--pp", "3", "--ranks", "8"], "choose a divisor of 8"),
        (["--pp", "2", "--schedule", "1f1B2"], "did you mean '1f1b'?"),
        (["--pp", "2", "--schedule", "fastest"], "known: naive, gpipe, 1f1b"),
        (["--pp", "2", "--schedule", "zbv", "--chunks", "3"], "3 stages on each rank, expected 2"),
        (["--pp", "8", "--chunks", "2", "--schedule", "interleaved"], "4 layers"),
    ],
)
def test_pipelines_that_cannot_be_planned_exit_with_1(call, args: list[str], words: str) -> None:
    code, shown, error = call(*PLAN, *args)
    assert (code, shown) == (1, "") and words in error


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
