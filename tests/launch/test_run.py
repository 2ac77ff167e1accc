"""`shardwise run` from outside: real processes, their output, their end, and what is left of them."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.harness import thorough
from tests.harness.jobs import environment, free_port, is_alive, launch, run_job, script

NOT_INHERITED = (
    "OMP_NUM_THREADS",
    "GLOO_SOCKET_IFNAME",
    "CUDA_VISIBLE_DEVICES",
    "MASTER_ADDR",
    "MASTER_PORT",
)

TELL = """
import json, os, sys
print(json.dumps({"args": sys.argv[1:], "env": dict(os.environ)}))
print("to standard error", file=sys.stderr)
"""
# Rank 1 has a bug while rank 0 waits for it in a collective, and one of its own is in flight.
COLLECTIVE = """
import os, sys, torch
import torch.distributed as dist
from shardwise.comm.setup import init_distributed
init_distributed()
x, y = torch.ones(1), torch.ones(1)
dist.all_reduce(x)
if dist.get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    dist.all_reduce(y, async_op=True)
    raise ValueError("bad batch")
dist.all_reduce(x)
dist.all_reduce(y)
sys.stdout.write(f"sum {int(x)} attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}\\n")
"""
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("pids", os.getpid(), child.pid, flush=True)
time.sleep(600)
"""


PLAIN = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
"""Without `tests/startup`, which changes how processes end."""


def _run(*words: object, **changes: str) -> subprocess.CompletedProcess[str]:
    return run_job(*words, without=NOT_INHERITED, **changes)


def _run_outside(*words: object, **changes: str) -> subprocess.CompletedProcess[str]:
    """Run a job by a launcher in a process of its own, with a line of input."""
    pipes: dict[str, Any] = {"input": "typed", "capture_output": True, "text": True, "timeout": 120}
    return subprocess.run(launch(*words), **pipes, env=environment(NOT_INHERITED, **changes))


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_each_rank_is_told_its_place(tmp_path) -> None:
    args = ["--num_gpus", "7", "--", "-q", "--help"]
    done = _run("--num_gpus=2", "--log-dir", tmp_path / "logs", script(tmp_path, TELL), *args)
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    for rank, line in enumerate(lines):
        tag, _, text = line.partition("] ")
        assert tag == f"[rank {rank}"
        told = json.loads(text)
        assert told["args"] == args
        env = told["env"]
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "LOCAL_SIZE": 2}
        job = {"CROSS_RANK": 0, "CROSS_SIZE": 1, "GROUP_RANK": 0, "TORCHELASTIC_RESTART_COUNT": 0}
        assert {name: env[name] for name in (*own, *job)} == {k: str(v) for k, v in (own | job).items()}
        assert env["MASTER_ADDR"] == "127.0.0.1" and int(env["MASTER_PORT"]) > 0
        assert env["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 2))
        assert env["GLOO_SOCKET_IFNAME"] == "lo"
        assert json.loads((tmp_path / "logs" / f"rank_{rank}.out").read_text()) == told
        assert f"[rank {rank}] to standard error" in done.stderr.splitlines()
    assert len(lines) == 2
    assert "2 processes on the CPU, meeting at 127.0.0.1:" in done.stderr


def test_a_rank_that_fails_is_named_and_its_traceback_comes_last(tmp_path) -> None:
    text = """
import os, sys, time
if os.environ["RANK"] == "1":
    time.sleep(0.2)
    import no_such_module
time.sleep(600)
"""
    done = _run("--nproc", "3", "-q", script(tmp_path, text))
    assert done.returncode == 1
    live, _, report = done.stderr.partition("shardwise run: ")
    assert "[rank 1] ModuleNotFoundError" in live
    assert report.startswith("rank 1 failed first: exit code 1, pid ")
    assert f" on {socket.gethostname()}, " in report
    assert report.splitlines()[1] == "Traceback (most recent call last):"
    assert report.rstrip().endswith("ModuleNotFoundError: No module named 'no_such_module'")
    assert "ChildFailedError" not in done.stderr and "torch/distributed/elastic" not in done.stderr


def test_exit_code_of_a_killed_rank(tmp_path) -> None:
    text = "import os, time\nif os.environ['RANK'] == '1': os.kill(os.getpid(), 9)\ntime.sleep(600)"
    done = _run("--nproc", "2", script(tmp_path, text))
    assert done.returncode == 128 + signal.SIGKILL
    assert "rank 1 failed first: killed by SIGKILL (signal 9)" in done.stderr
    assert "memory ran out" in done.stderr


@pytest.mark.parametrize("restarts", [0, thorough(1)])
def test_collective_with_a_failed_peer_and_restart(tmp_path, restarts: int) -> None:
    # The collective itself would wait for ten minutes or more.
    done = _run("--nproc", "2", "--max-restarts", restarts, script(tmp_path, COLLECTIVE))
    assert "[rank 1] ValueError: bad batch" in done.stderr
    if not restarts:
        assert done.returncode == 1 and "rank 1 failed first" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[rank 0] sum 4 attempt 1", "[rank 1] sum 4 attempt 1"]
    assert "rank 1 failed first (exit code 1); starting all 2 processes again (restart 1 of 1)" in done.stderr


@pytest.mark.thorough
def test_restart_by_torchrun_which_keeps_its_store(tmp_path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1"]
    argv = [*torchrun, f"--master-port={free_port()}", str(script(tmp_path, COLLECTIVE))]
    env = environment(NOT_INHERITED)
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, env=env, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["sum 4 attempt 1", "sum 4 attempt 1"]


def test_restarts_run_out(tmp_path) -> None:
    text = "import os, sys; print('attempt', os.environ['TORCHELASTIC_RESTART_COUNT']); sys.exit(5)"
    done = _run("--max-restarts", "2", script(tmp_path, text))
    assert done.returncode == 5
    assert done.stdout.splitlines() == [f"[rank 0] attempt {number}" for number in range(3)]


@pytest.mark.parametrize(("sig", "code"), [thorough(signal.SIGINT, 130), (signal.SIGTERM, 137)])
def test_signals_to_the_launcher_leave_nothing_behind(tmp_path, sig: signal.Signals, code: int) -> None:
    launcher = subprocess.Popen(
        launch("--nproc", "2", "--grace", "0.5", script(tmp_path, STUBBORN)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(NOT_INHERITED),
        start_new_session=True,
    )
    assert launcher.stdout is not None and launcher.stderr is not None
    pids = [int(pid) for _ in range(2) for pid in launcher.stdout.readline().split()[3:]]
    assert len(pids) == 4 and all(map(is_alive, pids))
    launcher.send_signal(sig)
    _, errors = launcher.communicate(timeout=20)
    assert launcher.returncode == code
    assert not any(map(is_alive, pids))
    killed = "ranks 0 and 1 did not end within 0.5 s and had to be killed, so nothing more was saved there"
    assert errors.splitlines()[-1] == f"shardwise run: received {sig.name}; {killed}; all processes have ended."


NEVER_MEETS = """
import os, signal, sys
def end():
    if os.environ["RANK"] == "1":
        if sys.argv[1].startswith("ends"):
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)
later = sys.argv[1].endswith("later")
if not later:
    end()
from shardwise.comm.setup import init_distributed
init_distributed()
if later:
    end()
    import torch, shardwise
    shardwise.initialize(model=torch.nn.Linear(2, 2), config={"train_micro_batch_size_per_gpu": 1})
"""


@pytest.mark.parametrize(
    ("what", "headline"),
    [
        thorough("ends", r"rank 1 ended with exit code 0 [\d.]+ s after the start"),
        thorough("stops", "rank 1 stands still: its process"),
        ("ends later", r"rank 1 ended with exit code 0 [\d.]+ s after the start"),
        thorough("stops later", "rank 1 stands still: its process"),
    ],
)
def test_a_rank_that_does_not_come_to_the_meeting_is_named(tmp_path, monkeypatch, what: str, headline: str) -> None:
    # One that has ended is noticed at once, whatever the limit is.
    monkeypatch.setenv("SHARDWISE_TIMEOUT", "10" if "ends" in what else "0.15" if "later" in what else "0.02")
    done = _run("--nproc", "2", "--grace", "0", script(tmp_path, NEVER_MEETS), what)
    assert done.returncode == 1
    report = done.stderr.partition("shardwise run: rank")
    assert re.match(headline, "rank" + report[2]), done.stderr
    assert "Without it rank 0 failed: exit code 1" in report[2]
    where = "the meeting in initialize()" if "later" in what else "the meeting of the ranks"
    assert f"LaunchError: rank 1 has not come to {where}" in report[2]
    for word in ("DistStoreError", "frame #", "TCPStore", "socket.cpp"):
        assert word not in done.stderr


def test_a_taken_port_is_named(tmp_path, taken_port: int) -> None:
    done = _run("--master_port", str(taken_port), script(tmp_path, "print('started')"))
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"shardwise: error: Port {taken_port} on 127.0.0.1 is taken by another program or job.")
    assert "--master_port" in line and "finds a free one itself" in line


def test_a_program_and_standard_input(tmp_path) -> None:
    program = tmp_path / "program.sh"
    program.write_text('#!/bin/sh\necho "$RANK got $(cat) $*"\n')
    program.chmod(0o755)
    done = _run_outside("-q", "--nproc", "2", "--no_python", program, "a b")
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == ["[rank 0] 0 got typed a b", "[rank 1] 1 got  a b"]


def test_variables_and_a_shell_script_before_the_start(tmp_path) -> None:
    (tmp_path / "setup.sh").write_text(
        """if [ "${BASH_SOURCE-}" = "$0" ]; then exit 33; fi
[ $# = 0 ] || exit 34
source /dev/null
export FROM_SETUP=$GIVEN-2
"""
    )
    text = "import os, sys; print(os.environ['GIVEN'], os.environ['FROM_SETUP'], sys.argv[1:])"
    options = ["--export", "GIVEN=1", "--venv-script", tmp_path / "setup.sh", "--python", sys.executable]
    done = _run("--nproc", "2", *options, script(tmp_path, text), "a b")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[rank {rank}] 1 1-2 ['a b']" for rank in range(2)]
    done = _run("--export", "NOT_SET_ANYWHERE", script(tmp_path, text))
    assert done.returncode != 0 and "--export NOT_SET_ANYWHERE: this variable is not set here" in done.stderr


OPENED_AND_LEFT = """
import atexit, pathlib, psutil, threading
def tell():
    names = [path.read_text().strip() for path in pathlib.Path("/proc/self/task").glob("*/comm")]
    print("of Gloo", [name for name in names if "gloo" in name], "of ours", threading.enumerate()[1:])
atexit.register(tell)
import torch, torch.distributed as dist, shardwise
dist.init_process_group("gloo")
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3}}
config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
config["checkpoint"] = {"memory_copies": {"every": 1}}
engine = shardwise.initialize(torch.nn.Linear(8, 8), config=config).engine
for step in range(2):
    engine.backward(engine(torch.randn(1, 8)).sum())
    engine.step()
dist.barrier()
if dist.get_rank() == 0:
    launcher = psutil.Process().parent()
    for process in [launcher, *launcher.children(recursive=True)]:
        for one in process.net_connections("inet"):
            if one.status == psutil.CONN_LISTEN:
                print("listens", one.laddr.ip, flush=True)
dist.barrier()
engine.destroy()
dist.destroy_process_group()
"""


def test_a_job_listens_on_loopback_only_and_no_thread_is_left_when_the_interpreter_ends(tmp_path) -> None:
    """Where a thread is inside of torch, or belongs to a group that torch has kept, the process aborts now and then."""
    done = _run_outside("--nproc", "2", script(tmp_path, OPENED_AND_LEFT), **PLAIN)
    assert done.returncode == 0, done.stderr
    found = [line.rpartition("listens ")[2] for line in done.stdout.splitlines() if "listens" in line]
    assert len(found) > 2 and set(found) <= {"127.0.0.1", "::1"}
    assert done.stdout.count("of ours []") == 2, done.stdout
    assert done.stdout.count("of Gloo []") == 2, done.stdout


NO_DESTROY = """
import sys, time, torch, shardwise
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
          "zero_optimization": {"stage": 3}, "progress": {"total_steps": 1}}
engine, *_ = shardwise.initialize(model=torch.nn.Linear(3, 3), config=config)
engine.backward(engine(torch.ones(1, 3)).sum())
engine.step()
time.sleep(0.3 * abs(engine.global_rank - int(sys.argv[1])))
print("done", engine.global_steps)
"""


@pytest.mark.parametrize(("ranks", "first_to_end"), [(2, 0), *(thorough(3, first) for first in (0, 2))])
def test_a_script_may_end_without_destroying_its_engine(tmp_path, ranks: int, first_to_end: int) -> None:
    done = _run("--nproc", ranks, script(tmp_path, NO_DESTROY), first_to_end, **PLAIN)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done 1") == ranks
    assert re.findall(r"^\[rank 0\] step (\d)/1 \| loss ", done.stderr, re.MULTILINE) == ["1"]  # by default
    for word in ("terminate", "frame #", "Traceback", "recvValue"):
        assert word not in done.stdout + done.stderr
