"""The file of `--pid-file`."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.errors import CommandLineError, LaunchError, ShardwiseError
from shardwise.launch.pidfile import pid_file
from tests.harness.jobs import run_job, script

SCRIPT = """
import json, os, sys, time
rank, attempt = os.environ["RANK"], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
while True:
    content = json.load(open(sys.argv[1]))
    if content["attempt"] == attempt and len(content["ranks"]) == 2:
        break
    time.sleep(0.02)
assert content["ranks"][rank]["pid"] == os.getpid() and content["launcher"]["pid"] == os.getppid()
print(attempt, rank, flush=True)
sys.exit(3 if attempt == 0 and rank == "1" else 0)
"""
HERE = socket.gethostname()


def test_a_job_writes_its_processes_again_after_a_restart_and_removes_the_file(tmp_path: Path) -> None:
    path = tmp_path / "pids.json"
    options = ("--nproc", 2, "--max-restarts", 1, "-q", "--tag-output", "never", "--pid-file", path)
    done = run_job(*options, script(tmp_path, SCRIPT), path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.splitlines()) >= {"0 1", "1 0", "1 1"}
    assert sorted(one.name for one in tmp_path.iterdir()) == ["script.py"]


def test_machines_are_put_together_and_lost_ones_disappear_with_the_next_attempt(tmp_path: Path) -> None:
    path, lines = tmp_path / "pids", []
    with pid_file(str(path), lines.append) as file:
        assert file is not None
        file.note("a", 0, [(0, 11)])
        file.note("b", 0, [(1, 12)])
        content = json.loads(path.read_text())
        assert content["ranks"] == {"0": {"host": "a", "pid": 11}, "1": {"host": "b", "pid": 12}}
        assert content["launcher"] == {"host": HERE, "pid": os.getpid()}
        file.note("b", 1, [(0, 13)])
        file.note("a", 0, [(0, 14)])
        assert json.loads(path.read_text())["ranks"] == {"0": {"host": "b", "pid": 13}}
        path.unlink()
        path.mkdir()
        file.note("b", 2, [(0, 15)])
        assert lines == [f"--pid-file {path}: Is a directory; the file is not up to date"]
        path.rmdir()
    assert not list(tmp_path.iterdir())


def _left(host: str, pid: int) -> str:
    return json.dumps({"launcher": {"host": host, "pid": pid}})


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        ("", CommandLineError, "exists, and is no file of process ids"),
        ("[1]", CommandLineError, "exists, and is no file of process ids"),
        (_left(HERE, 1), LaunchError, f"belongs to the job of process 1 on {HERE}"),
        (_left("other", 2**22), LaunchError, "on other. Give another name, or remove the file if that job has ended"),
    ],
)
def test_files_of_others_are_kept(tmp_path: Path, content: str, error: type[ShardwiseError], message: str) -> None:
    path = tmp_path / "pids"
    path.write_text(content)
    with pytest.raises(error, match=message), pid_file(str(path), print):
        pass
    assert path.read_text() == content


def test_a_file_left_over_is_replaced_and_one_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    path = tmp_path / "pids"
    path.write_text(_left(HERE, ended.pid))
    with pid_file(str(path), print):
        assert json.loads(path.read_text())["launcher"]["pid"] == os.getpid()
    with (
        pytest.raises(LaunchError, match=r"no/pids: No such file or directory\. Give a file in a writable directory"),
        pid_file(str(tmp_path / "no" / "pids"), print),
    ):
        pass
    with pid_file(None, print) as nothing:
        assert nothing is None
