"""Batch scripts of `shardwise run --slurm`, what is refused, and a job inside an allocation; programs of Slurm are
stand-ins. tests/machines has a real one.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, get_origin, get_type_hints

import pytest
import typer

from shardwise.errors import CommandLineError, LaunchError
from shardwise.launch import slurm
from shardwise.launch.commands import run
from shardwise.launch.job import Job, command_line
from shardwise.launch.placement import Devices, Host, Placement, Resources, place
from tests.harness.jobs import run_job
from tests.harness.tables import tables
from tests.launch.conftest import Call

SLURM = Job("train.py", slurm=True)


@pytest.fixture(autouse=True)
def outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No allocation, a directory with a script, and no programs of Slurm."""
    for name in [name for name in os.environ if name.startswith(("SLURM_", "SBATCH_"))]:
        monkeypatch.delenv(name)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "bin").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin")


def program(name: str, text: str) -> None:
    """Make a stand-in for a program."""
    path = Path("bin") / name
    path.write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{text}\n")
    path.chmod(0o755)


def test_the_script_has_the_options_of_the_job_and_the_users_last() -> None:
    more = "--partition gpu --comment 'a # b' --signal=B:TERM@500"
    job = dataclasses.replace(
        SLURM,
        args=("--name", "it's $HOME"),
        nproc=4,
        nodes="2",
        time="1-12",
        grace=100.5,
        sbatch_args=more,
        setup="a b",
    )
    *lines, last = slurm.script(job).splitlines()
    assert lines == [
        "#!/bin/bash",
        *("#SBATCH --job-name=train", "#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=1", "#SBATCH --cpus-per-task=4"),
        *("#SBATCH --time=1-12", "#SBATCH --signal=B:TERM@131", "#SBATCH --requeue", "#SBATCH --open-mode=append"),
        "#SBATCH --partition gpu --comment 'a # b' --signal=B:TERM@500",
        ". 'a b'",
    ]
    words = shlex.split(last)
    assert words[:5] == ["exec", sys.executable, "-m", "shardwise.launch", "run"]
    assert words[-3:] == ["train.py", "--name", "it's $HOME"] and "--slurm" in words
    assert not {"--time", "--sbatch-args", "--dry-run"} & set(words)
    assert "--venv-script" in words  # the agents source it
    elastic = slurm.script(dataclasses.replace(SLURM, nodes="2:4")).splitlines()
    assert elastic[2:4] == ["#SBATCH --nodes=2-4", "#SBATCH --no-kill"] and " 2:4 " in elastic[-1]
    assert "--venv-script" not in slurm.script(dataclasses.replace(SLURM, setup="env.sh"))
    plain = slurm.script(SLURM)
    assert "--nodes=1\n" in plain and "B:TERM@90" in plain and "--time" not in plain and "cpus" not in plain


def test_a_job_becomes_the_command_line_that_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    hints = get_type_hints(Job, include_extras=True)
    fields = [field for field in dataclasses.fields(Job) if get_origin(hints[field.name]) is Annotated]
    values = {bool: lambda field: not field.default, tuple: lambda field: ("A=1", "B=2")}
    given = {field.name: values.get(type(field.default), lambda field: "3")(field) for field in fields}
    numbers = ("max_restarts", "nproc", "node_rank", "master_port", "min_nproc", "ssh_port")
    given |= {**dict.fromkeys(numbers, 3), "grace": 3.5}
    job = Job(**{**given, "args": ("--lr", "1"), "progress": "off"})
    found = []
    monkeypatch.setattr(run, "run_job", lambda made: found.append(made) or 0)
    app = typer.Typer()
    run.register(app)
    with pytest.raises(SystemExit):
        app(command_line(job))
    assert found == [job]


@pytest.mark.parametrize(("change", "message"), tables(__file__)["wrong"])
def test_wrong_options_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(CommandLineError, match=message):
        slurm.check(dataclasses.replace(SLURM, **change))  # type: ignore[arg-type]


def test_a_dry_run_submits_nothing_and_needs_no_slurm(call: Call) -> None:
    code, out, _ = call("run", "--slurm", "--nnodes", "2", "--dry-run", "train.py")
    assert code == 0 and out.startswith("#!/bin/bash\n#SBATCH --job-name=train\n")
    code, out, err = call("run", "--slurm", "train.py")
    assert code == 1 and not out and "--slurm: there is no program sbatch here" in err


def test_number_and_output_of_a_submitted_job_are_shown(call: Call) -> None:
    program("sbatch", 'cat > script; echo "$@" > arguments; echo "7;far"; echo queued >&2; exit 3')
    program("scontrol", 'test "$*" = "show job 7" && printf "JobId=7\\n   StdOut=/here/slurm-7.out\\n"')
    code, out, err = call("run", "--slurm", "train.py")
    assert (code, err) == (3, "queued\n")  # as sbatch --wait, which ends with the exit code of the job
    assert out == "Submitted as job 7 of Slurm; its output goes to /here/slurm-7.out\n"
    assert Path("script").read_text() == slurm.script(SLURM) and Path("arguments").read_text() == "--parsable\n"
    program("scontrol", "exit 1")
    assert call("run", "--slurm", "train.py")[1].endswith("the file that `scontrol show job 7` shows\n")
    program("sbatch", "echo no such account >&2; exit 1")
    code, out, err = call("run", "--slurm", "train.py")
    assert (code, out) == (1, "") and "sbatch has refused the job (exit code 1): no such account" in err


def test_inside_an_allocation_its_nodes_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert slurm.allocated(SLURM) is None
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    with pytest.raises(LaunchError, match="cannot start scontrol: No such file"):
        slurm.allocated(SLURM)
    program("scontrol", 'test "$*" = "show hostnames n[1-2]" && printf "n1\\nn2\\n"')
    assert slurm.allocated(SLURM) == [Host("n1", ()), Host("n2", ())]
    assert slurm.allocated(dataclasses.replace(SLURM, nodes="1")) == [Host("n1", ())]
    assert slurm.allocated(dataclasses.replace(SLURM, nodes="1:3")) == [Host("n1", ()), Host("n2", ())]
    with pytest.raises(CommandLineError, match="--nnodes 3: the allocation has only 2 nodes: n1, n2"):
        slurm.allocated(dataclasses.replace(SLURM, nodes="3"))
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "16")
    with pytest.raises(CommandLineError, match="srun has started this command 16 times"):
        slurm.allocated(SLURM)


def test_a_node_without_slots_gives_its_devices() -> None:
    node, gpus = Host("n1", ()), Devices(("0", "1"))
    assert place(Resources(num_nodes=2), gpus, node) == Placement(2, ("0", "1"))
    assert place(Resources(num_nodes=2), Devices(), node) == Placement(1, None)
    assert place(Resources(nproc=3, num_nodes=2), Devices(), node) == Placement(3, None)
    with pytest.raises(CommandLineError, match="3 processes are requested, but there are only 2 CUDA devices here"):
        place(Resources(nproc=3), gpus, node)


def test_a_batch_job_of_one_node_runs_without_srun() -> None:
    Path("train.py").write_text("import os; print('rank', os.environ['RANK'], os.environ['WORLD_SIZE'])")
    program("scontrol", "hostname")
    variables = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "here", "CUDA_VISIBLE_DEVICES": ""}
    done = run_job("--slurm", "--nproc", 2, "-q", "train.py", **variables)
    assert sorted(done.stdout.splitlines()) == ["[rank 0] rank 0 2", "[rank 1] rank 1 2"], done.stderr
