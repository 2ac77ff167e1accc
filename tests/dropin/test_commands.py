"""The commands of the distribution, and `shardwise doctor`."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.errors import CommandLineError, NotBuiltError
from shardwise.launch.commands import doctor
from shardwise.launch.detect import Detected, installed
from shardwise_deepspeed.commands import report, report_command
from shardwise_deepspeed.entries import read
from shardwise_deepspeed.launcher import job_of, main
from shardwise_deepspeed.version import VERSION
from tests.dropin.test_modules import package

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

DIRECTORY = Path(__file__).parents[2] / "dropin"
pytestmark = pytest.mark.usefixtures("plain")


def test_the_distribution_is_what_the_library_says() -> None:
    project = tomllib.loads((DIRECTORY / "pyproject.toml").read_text())["project"]
    assert project["name"] == "deepspeed" and project["dependencies"][0] == "shardwise"
    assert set(project["scripts"]) == {
        *("deepspeed", "ds", "ds_report", "dsr"),
        *("ds_bench", "ds_elastic", "ds_io", "ds_nvme_tune", "ds_ssh", "zero_to_fp32"),
    }
    for target in project["scripts"].values():
        home, _, name = target.partition(":")
        assert callable(getattr(importlib.import_module(home), name))


def test_options_become_a_job() -> None:
    options = "--num_gpus 2 --master_port 29600 --no_local_rank --enable_each_rank_log logs -q --launcher PDSH"
    job = job_of(f"{options} --ssh_port 22 --bind_core_list 0,2-4 train.py --num_gpus 4 --deepspeed".split())
    assert (job.core_list, job.local_rank) == ("0,2-4", False)
    assert (job.script, job.args) == ("train.py", ("--num_gpus", "4", "--deepspeed"))
    assert (job.resources.nproc, job.resources.num_nodes, job.master_port) == (2, None, 29600)
    assert job.quiet and job.log_dir == "logs" and not job.module
    plain = job_of(["--num_accelerators=3", "--num_nodes=1", "--node_rank=-1", "--module", "package.train"])
    assert (plain.resources.nproc, plain.resources.num_nodes, plain.module) == (3, 1, True)
    assert (plain.master_addr, plain.master_port, plain.log_dir) == (None, None, None)
    assert job_of(["-i", "localhost:0,1", "train.py"]).resources.include == "localhost:0,1"
    assert plain.pid_file is None and job_of(["--save_pid", "a.py"]).pid_file == f"/tmp/{os.getpid()}.deepspeed"


def test_a_hostfile_that_is_missing_is_this_machine(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert job_of(["-H", str(tmp_path / "hosts"), "train.py"]).resources.hostfile is None
    (tmp_path / "hosts").write_text("a slots=2\n")
    assert job_of(["-H", str(tmp_path / "hosts"), "train.py"]).resources.hostfile == str(tmp_path / "hosts")


@pytest.mark.parametrize("name", read("options.toml")["deepspeed"]["refused"])
def test_what_is_not_built_is_refused(name: str) -> None:
    flags = ("force_multi", "no_ssh", "elastic_training")
    with pytest.raises(NotBuiltError, match=f"--{name}: .*not built yet"):
        job_of([f"--{name}", *([] if name in flags else ["2"]), "train.py"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nope", "train.py"], "nope"),
        (["--num_gpus", "two", "train.py"], "num_gpus"),
        ([], "user_script"),
        (["--launcher", "rsh", "train.py"], "--launcher: invalid choice: 'rsh'"),
        (["--log_level", "loud", "train.py"], "--log_level: invalid choice: 'loud'"),
        (["--num_nodes", "2", __file__], "--nnodes 2: the machines are not known"),
    ],
)
def test_wrong_options_are_one_message(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    error = capsys.readouterr().err
    assert end.value.code == 2
    assert error.startswith("deepspeed: error: ") and message in error


def test_unknown_options_are_the_command_lines_fault() -> None:
    with pytest.raises(CommandLineError):
        job_of(["--num_gpu", "2", "train.py"])


def test_python_m_runs_what_is_a_command() -> None:
    for module in ("deepspeed.launcher.runner", "deepspeed.env_report", "deepspeed.utils.zero_to_fp32"):
        command = [sys.executable, "-m", module, "--help"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=DIRECTORY)
        assert done.returncode == 0 and "usage:" in done.stdout, done.stderr


def test_a_job_on_several_machines(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("10.0.0.1 slots=2\n10.0.0.2 slots=2\n")
    common = ["--hostfile", str(hosts), "--master_addr=10.0.0.1", "--venv_script", "env.sh"]
    job = job_of([*common, "--launcher", "OpenMPI", "--launcher_args", "-x A", "train.py"])
    assert (job.hostfile, job.master_addr, job.launcher) == (str(hosts), "10.0.0.1", "openmpi")
    assert (job.launcher_args, job.setup) == ("-x A", "env.sh")
    assert job_of([*common, "--ssh_port", "2222", "train.py"]).launcher == "ssh"  # DeepSpeed needs pdsh by default


def test_packages_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = installed()  # a drop-in that is installed where the tests run
    real = package(tmp_path / "real", "0.16.0")
    ours = package(tmp_path / "ours", VERSION, (DIRECTORY / "deepspeed" / "__init__.py").read_text())
    (tmp_path / "other" / "deepspeed").mkdir(parents=True)  # a directory of this name is no package
    for directory in (tmp_path / "other", ours, real):
        monkeypatch.syspath_prepend(str(directory))
    assert installed() == [
        Detected("real", "0.16.0", str(real / "deepspeed")),
        Detected("drop-in", VERSION, str(ours / "deepspeed")),
        *before,
    ]


REAL, OURS = Detected("real", "0.16.0", "/a/deepspeed"), Detected("drop-in", VERSION, "/b/deepspeed")


@pytest.mark.parametrize(
    ("found", "said", "code"),
    [
        ([], "none; the drop-in of a checkout", 0),
        ([REAL], "DeepSpeed itself, 0.16.0, at /a/deepspeed", 0),
        ([OURS], f"shardwise's drop-in, {VERSION}, at /b/deepspeed", 0),
        ([OURS, REAL], "hidden by it: DeepSpeed itself, 0.16.0, at /a/deepspeed", 1),
    ],
)
def test_the_doctor_says_which_one_is_active(
    found: list[Detected],
    said: str,
    code: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shardwise.launch.detect.installed", lambda: found)
    assert doctor.show() == code
    shown = capsys.readouterr().out
    assert said in shown and "torch" in shown
    assert ("both are on the path" in shown) == bool(code)
    assert doctor.show(as_json=True) == code
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is (code == 0) and [entry["kind"] for entry in told["deepspeed"]] == [f.kind for f in found]


def test_ds_report_is_the_doctor_and_a_list_of_operators(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert report(hide_operator_status=True) == 0
    assert capsys.readouterr().out.startswith("shardwise")
    assert report(hide_errors_and_warnings=True) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^  cpu_adam +\[OKAY\]$", shown, re.M) and re.search(r"^  sparse_attn +\[NO\]$", shown, re.M)
    with pytest.raises(SystemExit) as ended:
        report_command(["--hide_operator_status"])
    assert ended.value.code == 0 and "async_io" not in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["train.py", "--epochs", "3"])  # arguments of a script are its own
    assert report() == 0
    shown = capsys.readouterr().out
    assert re.search(r"^  async_io +\[OKAY\]", shown, re.M)
    assert re.search(r"^  gds +\[NO\] +\(GPUDirect Storage is not built yet", shown, re.M)
