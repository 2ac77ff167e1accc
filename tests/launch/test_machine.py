"""The agent of one of several machines, and the commands that start it."""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.errors import LaunchError
from shardwise.launch import local, machine, wire
from shardwise.launch.coordinator import Plan
from shardwise.launch.job import Job
from shardwise.launch.placement import Host
from shardwise.launch.runners import AgentCommand
from shardwise.launch.runners.programs import PROGRAMS
from shardwise.launch.runners.ssh import SshRunner
from tests.harness.jobs import script
from tests.harness.tables import tables

COMMAND = AgentCommand("python", "/work")


@pytest.mark.parametrize(("launcher", "own", "number"), tables(__file__)["machines"])
def test_an_agent_imports_torch_before_it_connects_and_finds_its_machine(
    launcher: str, own: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    def connect(address: str, *_: Any) -> None:
        calls.append(address)
        raise LaunchError("refused")

    monkeypatch.setattr(local, "import_torch", lambda: calls.append("torch"))
    monkeypatch.setattr(machine, "find_devices", lambda: calls.append("devices"))
    monkeypatch.setattr(machine, "is_this_machine", lambda name: name in own)
    monkeypatch.setattr(wire, "connect", connect)
    monkeypatch.setattr(os, "dup2", lambda *_: None)
    # In a job of Slurm all are there, also of an outer mpirun.
    for name, value in {"SLURM_PROCID": "0", "OMPI_COMM_WORLD_RANK": "2", "PMI_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    machines = [{"number": n, "name": f"m{n}", "address": f"a{n}", "port": 1, "slots": []} for n in range(4)]
    job = dataclasses.asdict(Job("train.py", launcher=launcher))
    given = {"secret": "00", "machines": machines, "variables": {}, "job": job}
    monkeypatch.setenv("SHARDWISE_AGENT", json.dumps(given))
    with pytest.raises(SystemExit, match="refused"):
        machine.main()
    assert calls == ["torch", "devices", f"a{number}"]


def test_a_second_signal_ends_a_grace_period_at_once(tmp_path: Path) -> None:
    flag = tmp_path / "begun"
    code = "import pathlib, signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    path = script(tmp_path, code + f"pathlib.Path({str(flag)!r}).touch()\ntime.sleep(60)\n")
    messages: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    sent: list[dict[str, Any]] = []
    channel: Any = SimpleNamespace(on_message=messages.put, send=sent.append)
    plan = Plan(0, (0,), 0, 1, 0, 1, "127.0.0.1", 1, False)
    given = {"job": dataclasses.asdict(Job(str(path), nproc=1)), "secret": "00", "run_id": "one"}

    def launcher() -> None:
        channel.on_message({"do": "start", "plan": dataclasses.asdict(plan)})
        while not flag.exists():
            time.sleep(0.01)
        for message in ({"do": "stop", "signal": 15, "grace": 50.0}, {"do": "end"}):
            channel.on_message(message)
        time.sleep(0.5)  # the agent waits for the rank, which ignores SIGTERM
        channel.on_message({"do": "skip_grace_period"})

    thread = threading.Thread(target=launcher)
    thread.start()
    began = time.monotonic()
    assert machine.serve(given, 0, Host("localhost", (0,)), "127.0.0.1", channel, messages) == {"do": "end"}
    thread.join()
    assert time.monotonic() - began < 30
    (stopped,) = (one["content"] for one in sent if one.get("event") == "stopped")
    assert [end["code"] for end in stopped["exits"]] == [-9]


def test_srun_and_mpirun_give_an_agent_all_cores_of_its_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    given = PROGRAMS["slurm"](dataclasses.replace(COMMAND, args=("--cpu-bind=cores",)), ["n1", "n2"], "")
    assert "--cpus-per-task" not in given
    assert given.index("--cpu-bind=none") < given.index("--cpu-bind=cores")  # the last one counts
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "24")
    given = PROGRAMS["slurm"](COMMAND, ["n1", "n2"], "")
    assert given[given.index("--cpus-per-task") + 1] == "24" and "--cpu-bind=none" in given
    for args, binding in (((), "none"), (("--bind-to", "socket"), "socket")):
        given = PROGRAMS["openmpi"](dataclasses.replace(COMMAND, args=args), ["n1", "n2"], "")
        assert given.count("--bind-to") == 1 and given[given.index("--bind-to") + 1] == binding


def test_connections_of_ssh_are_shared_where_the_path_of_the_socket_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        for home, shared in ((Path(short), True), (Path(short) / ("long" * 10), False)):
            (home / ".ssh").mkdir(parents=True)
            monkeypatch.setenv("HOME", str(home))
            argv = SshRunner(COMMAND).argv("elsewhere.invalid", 1)
            assert any("ControlPath" in part for part in argv) is shared


def test_the_agent_of_this_machine_is_started_in_the_shell_of_its_setup(tmp_path: Path) -> None:
    (tmp_path / "setup.sh").write_text("export FROM_SETUP=1\n")
    program = tmp_path / "program"
    program.write_text('#!/bin/sh\necho "$PWD $FROM_SETUP $PYTHONPATH $SHARDWISE_NODE"\n')
    program.chmod(0o755)
    command = AgentCommand(str(program), str(tmp_path), ("PYTHONPATH=a b",), setup="setup.sh")
    done = subprocess.run(SshRunner(command).argv("localhost", 2), capture_output=True, text=True, check=True)
    assert done.stdout == f"{tmp_path} 1 a b 2\n"
