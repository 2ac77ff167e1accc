"""`shardwise run --autotuning`: what is run, how runs end, and the files."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from shardwise.comm.environment import CONFIG_OVERRIDE
from shardwise.errors import CommandLineError, ConfigError
from shardwise.launch import tuning
from shardwise.launch.job import Job
from tests.harness import thorough
from tests.harness.jobs import environment, is_alive, run_job, script
from tests.harness.tables import tables
from tests.harness.tuning import calls, candidate, configure, describe, pretended_launcher


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a script and a configuration, and a launcher that only pretends."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tuning, "LAUNCH", pretended_launcher(tmp_path))
    return tmp_path


def searched(*args: str, **options: Any) -> tuple[int, tuning.Tuning]:
    """Search; return the exit code and the search."""
    search = tuning.Tuning(Job("train.py", args or ("--deepspeed_config", "ds.json"), **options))
    return search.tune(), search


def test_every_end_of_a_run_is_a_result(place: Path) -> None:
    code, search = searched(nproc=1)
    assert code == 0
    ends = {one.config["train_micro_batch_size_per_gpu"]: (one.status, one.reason) for one in search.results}
    assert ends == {
        1: ("failed", ends[1][1]),
        2: ("failed", "ValueError: bad batch"),
        4: ("time limit", "no result after 2 s (autotuning.time_limit)"),
        8: ("not as configured", ends[8][1]),
        16: ("measured", ""),
        32: ("out of memory", "shardwise.memory.OutOfMemoryError: no room"),
        64: ("not run", "z1_mbs32_gas1, with a smaller micro-batch, ran out of memory"),
    }
    assert ends[1][1].startswith("the script ended before step 5.") and "zero_optimization.stage is 0" in ends[8][1]


def test_files_of_a_search(place: Path) -> None:
    configure(place, results_dir="found/here", tuner_num_trials=99)
    describe(place, candidate(16), candidate(32))
    assert searched(nproc=1)[0] == 0
    results = place / "found" / "here"
    best = json.loads((results / "ds_config_optimal.json").read_text())
    assert best == candidate(16).config  # without the section
    command = (results / "cmd_optimal.txt").read_text()
    assert command == "shardwise run --nproc 1 train.py --deepspeed_config found/here/ds_config_optimal.json\n"
    summary = (results / "summary.txt").read_text().splitlines()
    assert summary[1].split()[:3] == ["z1_mbs16_gas1", "160", "samples/s"] and summary[-1].startswith("best: z1_mbs16")
    stored = json.loads((results / "z1_mbs32_gas1.json").read_text())
    assert stored["status"] == "out of memory" and stored["exit"] == 1
    given = json.loads((place / "autotuning_exps" / "z1_mbs16_gas1" / "ds_config.json").read_text())
    assert given["train_batch_size"] == 16 and given["autotuning"]["enabled"]
    assert all(call[-1].endswith("ds_config.json") and call[-2] == "--deepspeed_config" for call in calls(place))


def test_results_are_kept_without_overwrite(place: Path) -> None:
    configure(place, overwrite=False)
    describe(place, candidate(16), candidate(32))
    assert searched()[0] == 0 and len(calls(place)) == 3
    code, search = searched()
    assert code == 0 and len(calls(place)) == 3 and all(one.kept for one in search.results)
    searched("--deepspeed_config", "ds.json", "--seed", "1")  # another command
    assert len(calls(place)) == 6
    configure(place)
    searched()
    assert len(calls(place)) == 9


def test_runs_end_early_without_a_gain_and_at_the_number_of_trials(place: Path) -> None:
    describe(place, *map(candidate, (48, 40, 24, 20)))
    configure(place, tuner_early_stopping=1)
    results = {one.name: one for one in searched()[1].results}
    assert all(one.status == "measured" for one in results.values())  # each is better than those before
    configure(place, tuner_num_trials=2)
    results = {one.name: one for one in searched()[1].results}
    assert results["z1_mbs40_gas1"].reason == "autotuning.tuner_num_trials is 2"
    configure(place, tuner_early_stopping=1, metric="latency")
    results = {one.name: one for one in searched()[1].results}
    assert results["z1_mbs40_gas1"].reason == "1 runs before it were no better than the best"


def test_plans_keep_candidates_from_being_run(place: Path) -> None:
    describe(
        place, candidate(16, fits=True, seconds=1.0), candidate(2, fits=False), candidate(4, fits=True, seconds=1.0)
    )
    assert {one.name: one.reason for one in searched()[1].results if one.reason} == {
        "z1_mbs2_gas1": "the plan does not fit the memory",
        "z1_mbs4_gas1": "planned to take 4.0 times as long as z1_mbs16_gas1",
    }


def test_without_a_result_the_reasons_are_named(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    describe(place, candidate(2), candidate(32))
    assert searched()[0] == 1
    shown = capsys.readouterr().err
    assert "z1_mbs2_gas1: failed: ValueError: bad batch" in shown and "z1_mbs32_gas1: out of memory" in shown
    assert "z1_mbs32" in (place / "autotuning_results" / "summary.txt").read_text()


def test_a_first_run_without_room_is_repeated_with_the_least_memory(place: Path) -> None:
    (place / "small").touch()
    describe(place, candidate(16))
    assert searched()[0] == 0
    keys = json.loads((place / "autotuning_exps" / "model_info_z3" / "override.json").read_text())
    assert keys["zero_optimization"] == {"stage": 3} and keys["train_micro_batch_size_per_gpu"] == 1


def test_a_first_run_that_fails_ends_the_search(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "facts.json").unlink()
    assert searched()[0] == 1
    assert "nothing was tuned, because the first run failed: failed: FileNotFoundError" in capsys.readouterr().err


def test_a_script_that_takes_no_step_is_an_error(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "pretended.py").write_text("")
    assert searched()[0] == 1
    assert "no engine has taken a step. The script calls shardwise.initialize()" in capsys.readouterr().err


def test_a_script_with_a_dictionary(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    describe(place, candidate(16))
    code, search = searched("--lr", "1")
    assert code == 0 and "no argument of the script names a configuration file" in capsys.readouterr().err
    search.best_job()
    assert os.environ.pop(CONFIG_OVERRIDE) == str(place / "autotuning_results" / "ds_config_optimal.json")
    command = (place / "autotuning_results" / "cmd_optimal.txt").read_text()
    assert command.startswith(f"{CONFIG_OVERRIDE}={place}") and command.endswith("train.py --lr 1\n")


def test_arguments_that_repeat_keys_are_set(place: Path) -> None:
    mappings = {"train_micro_batch_size_per_gpu": "--batch", "gradient_accumulation_steps": "--passes"}
    configure(place, arg_mappings=mappings)
    describe(place, candidate(16))
    assert searched("--deepspeed=ds.json", "--batch=2")[0] == 0
    first, second = calls(place)
    assert first[-2] == "--deepspeed=autotuning_exps/model_info/ds_config.json" and first[-1] == "--batch=2"
    assert second[-3:] == ["--batch=16", "--passes", "1"]


def test_the_argument_of_the_configuration(place: Path) -> None:
    (place / "data.json").write_text("[]")
    assert tuning.config_argument(["--data", "data.json", "--deepspeed", "--lr", "1"]) is None
    assert tuning.config_argument(["--data", "data.json", "--config", "ds.json"]) == 3
    assert tuning.config_argument(["--config=ds.json"]) == 0
    (place / "other.json").write_text('{"autotuning": {}}')
    with pytest.raises(CommandLineError, match=r"several arguments .* ds\.json, other\.json"):
        tuning.config_argument(["ds.json", "other.json"])


@pytest.mark.parametrize(("section", "message"), tables(__file__)["wrong"])
def test_a_wrong_section_is_refused(place: Path, section: dict[str, Any], message: str) -> None:
    configure(place, **section)
    with pytest.raises(ConfigError, match=message):
        searched()


def test_options_that_do_not_go_with_a_search(call: Any, place: Path) -> None:
    code, _, error = call("run", "--autotuning", "maybe", "train.py")
    assert code == 2 and "--autotuning maybe: choose tune or run" in error
    by_hand = ["--nnodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1"]
    code, _, error = call("run", "--autotuning", "tune", *by_hand, "train.py")
    assert code == 2 and "--autotuning starts many jobs" in error


def test_ctrl_c_ends_the_run_and_leaves_the_results(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configure(place, time_limit=60)
    describe(place, candidate(2), candidate(4))  # the second one hangs

    def interrupt() -> None:
        while not (place / "hangs").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    code, search = searched()
    assert code == 130 and [one.name for one in search.results] == ["z1_mbs2_gas1"]
    assert "received SIGINT; the results so far are in autotuning_results" in capsys.readouterr().err
    assert "bad batch" in (place / "autotuning_results" / "summary.txt").read_text()
    pid = int((place / "hangs").read_text())
    assert not is_alive(pid)


SCRIPT = """
import sys, torch, shardwise
engine, *_ = shardwise.initialize(model=torch.nn.Linear(8, 8), config=sys.argv[1])
for _ in range(8):
    loss = engine(torch.randn(engine.train_micro_batch_size_per_gpu(), 8)).sum()
    engine.backward(loss)
    engine.step()
print("steps", engine.global_steps, engine.train_micro_batch_size_per_gpu())
"""
IN_ONE_PROCESS = "import runpy, sys; sys.argv = sys.argv[-2:]; runpy.run_path(sys.argv[0], run_name='__main__')"


def real(place: Path, **batch: object) -> Path:
    """Write a script that trains, and its configuration."""
    section = {"tuner_num_trials": 1, "num_tuning_micro_batch_sizes": 1, "end_profile_step": 3}
    optimizer = {"type": "SGD", "params": {"lr": 0.1}}
    given = {**(batch or {"train_batch_size": 4}), "optimizer": optimizer, "autotuning": section}
    (place / "ds.json").write_text(json.dumps(given))
    return script(place, SCRIPT)


@pytest.mark.parametrize(
    ("batch", "name"),
    [
        thorough({"train_batch_size": 4}, "z0_mbs4_gas1", id="global"),
        ({"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 2}, "z0_mbs1024_gas2"),
    ],
)
def test_a_real_script_is_tuned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: dict[str, object], name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tuning, "LAUNCH", (sys.executable, "-c", IN_ONE_PROCESS))
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    search = tuning.Tuning(Job(str(real(tmp_path, **batch)), ("ds.json",)))
    assert search.tune() == 0
    (one,) = search.results
    assert (one.name, one.status) == (name, "measured") and one.planned
    assert "steps" not in (tmp_path / "autotuning_exps" / one.name / "stdout.log").read_text()  # ended before


@pytest.mark.thorough
def test_a_real_script_is_tuned_and_then_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = run_job("--autotuning", "run", real(tmp_path), "ds.json")
    assert done.returncode == 0, done.stderr
    assert "z0_mbs4_gas1" in done.stdout and "steps 8 4" in done.stdout
    assert done.stdout.count("steps") == 1  # of the job; the others ended before
