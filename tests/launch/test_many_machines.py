"""A job of many machines, all but the first imagined: their agents are connections of one process."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Sequence
from multiprocessing import AuthenticationError
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import LaunchError
from shardwise.launch import facts, machines, reach, wire
from shardwise.launch.job import Job
from shardwise.launch.machines import command_of
from shardwise.launch.output import Terminal
from shardwise.launch.placement import Host, find_devices, place
from shardwise.launch.processes import Exit
from shardwise.launch.runners import Show
from shardwise.launch.workers import worker_environment
from tests.harness import thorough
from tests.harness.jobs import free_port, launch, script

SECRET = "s" * 16
KEY = hashlib.sha256(SECRET.encode()).digest()


class Machine:
    """The connection of an imagined machine; `received` counts the launcher's messages by kind."""

    def __init__(self, number: int, port: int, job: Job, known: facts.Facts | None, ends: bool) -> None:
        self.received: Counter[str] = Counter()
        self.started, self.ended = threading.Event(), threading.Event()
        self._known, self._ends, self._rank = known, ends, 0
        connection, _ = wire.connect("127.0.0.1", port, KEY, 60.0)
        self._channel = wire.Channel(connection, self._answer, lambda reason: self.ended.set())
        self._channel.begin()
        joining = {"name": f"m{number}", "rank": number, "command": command_of(job)}
        self._channel.send({"join": joining})

    def _answer(self, message: dict[str, Any]) -> None:
        kind = str(message["do"])
        self.received[kind] += 1
        if kind == "take" and self._known is not None:
            known = dataclasses.replace(self._known, clock=time.time())
            self._channel.send({"node": message["number"], "facts": dataclasses.asdict(known)})
        elif kind == "reach":
            self._tell("reached", [{"error": ""} for _ in message["machines"]])
        elif kind == "start":
            self._rank = message["plan"]["first_rank"]
            self.started.set()
            if self._ends:
                self.finish()
        elif kind == "stop":
            exits = [dataclasses.asdict(Exit(self._rank, 1, -15, time.time(), True))]
            self._tell("stopped", {"exits": exits, "killed": {}, "troubles": [], "frozen": [], "grace": 0.0})
        elif kind == "end":
            self._channel.close()
            self.ended.set()

    def finish(self) -> None:
        """Say that the ranks have ended."""
        self._tell("finished", [dataclasses.asdict(Exit(self._rank, 1, 0, time.time(), False))])

    def leave(self) -> None:
        """Break the connection."""
        self._channel.close()

    def _tell(self, kind: str, content: Any) -> None:
        self._channel.send({"event": kind, "content": content})


class Started:
    """A job whose first machine is real: its part of `shardwise run`, and what the others need to join it."""

    def __init__(self, folder: Path, nodes: str, code: str) -> None:
        path, self._port = script(folder, code), free_port()
        command = launch("--nnodes", nodes, "--node-rank", 0, "--master-addr", "127.0.0.1")
        command += ["--master-port", str(self._port), "--nproc", "1", str(path)]
        env = {**os.environ, "SHARDWISE_SECRET": SECRET}
        self.process = subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self._answers = reach.EchoServer("127.0.0.1", KEY)
        self._job = Job(script=str(path), nproc=1, tags="always", progress="auto")
        ranks = worker_environment(self._job, place(self._job.resources, find_devices()), interface="")
        self._known = facts.facts_of(self._job, ranks, address="127.0.0.1", port=self._answers.port, processes=1)
        with socket.socket() as probe:
            while probe.connect_ex(("127.0.0.1", self._port)):
                assert self.process.poll() is None
                time.sleep(0.05)

    def join(self, number: int, *, ends: bool = True, reports: bool = True, torch: str | None = None) -> Machine:
        """Let an imagined machine join, and report its facts, with another version of torch if given; its ranks end
        when they are started, or run until they are stopped.
        """
        versions = self._known.versions | ({} if torch is None else {"torch": torch})
        known = dataclasses.replace(self._known, versions=versions)
        return Machine(number, self._port, self._job, known if reports else None, ends)

    def output(self) -> tuple[str, str]:
        """Return what the first machine has printed, at the end of the job."""
        try:
            return self.process.communicate(timeout=100)
        finally:
            self.process.kill()
            self._answers.close()


@pytest.fixture(autouse=True)
def no_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)  # the loopback interface does not reach other machines


@pytest.mark.limit(120)
@pytest.mark.parametrize("count", [64, thorough(1024)])
def test_messages_and_time_of_a_start_grow_with_machines(tmp_path: Path, count: int) -> None:
    job = Started(tmp_path, str(count), "import os\nprint('world', os.environ['WORLD_SIZE'])\n")
    began = time.monotonic()
    joined = [job.join(number) for number in range(1, count)]
    out, err = job.output()
    assert job.process.returncode == 0, err
    assert f"world {count}" in out
    assert all(machine.ended.wait(10) for machine in joined)
    assert all(machine.received == {"take": 1, "reach": 1, "start": 1, "end": 1} for machine in joined)
    assert time.monotonic() - began < 60


def test_a_machine_whose_connection_broke_may_come_again_before_that_is_noticed(tmp_path: Path) -> None:
    end = tmp_path / "end"
    job = Started(tmp_path, "1:2", f"import os, time\nwhile not os.path.exists({str(end)!r}): time.sleep(0.05)\n")
    first = job.join(1, ends=False)
    assert first.started.wait(30)
    again = job.join(1, ends=False)
    assert first.ended.wait(10) and again.started.wait(30) and not again.ended.is_set()
    end.touch()
    again.finish()
    _, err = job.output()
    assert job.process.returncode == 0, err
    assert "machine m1 (rank 1) is lost: it has come again" in err


def test_a_launcher_that_is_too_busy_to_answer_is_asked_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = int(busy.getsockname()[1])
        asked = threading.Thread(target=lambda: answers.append(wire.connect("127.0.0.1", port, KEY, 30.0)))
        answers: list[Any] = []
        asked.start()
        busy.accept()[0].close()
        wire._handshake(wire._connection(busy.accept()[0]), KEY, first=True)
        asked.join(30)
        assert len(answers) == 1
        threading.Thread(
            target=lambda: wire.authenticated(socket.create_connection(("127.0.0.1", port)), b"other")
        ).start()
        with pytest.raises(AuthenticationError):
            wire._handshake(wire._connection(busy.accept()[0]), KEY, first=True)


def test_a_launcher_that_accepts_and_is_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "_HANDSHAKE_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(LaunchError, match="does not answer"):
        wire.connect("127.0.0.1", int(silent.getsockname()[1]), KEY, 0.5)


@pytest.mark.parametrize("known", [True, thorough(False)])
def test_another_takes_the_place_of_a_machine_that_is_lost_before_the_start(tmp_path: Path, known: bool) -> None:
    job = Started(tmp_path, "3", "import os\nprint('world', os.environ['WORLD_SIZE'])\n")
    first = job.join(1, reports=known, torch="0.1")  # its facts are not compared
    while not first.received["take"]:
        time.sleep(0.02)
    first.leave()
    assert job.process.stderr is not None
    assert any("the connection to its agent was lost" in line for line in job.process.stderr)
    others = [job.join(number) for number in (2, 3)]
    out, err = job.output()
    assert job.process.returncode == 0 and "world 3" in out, err
    assert all(machine.started.is_set() for machine in others)


class Failed:
    """The failed start of an agent."""

    closed = False

    def ended(self) -> dict[int, str]:
        return {0: "ended with exit code 255"}

    def close(self) -> None:
        self.closed = True


class Runner:
    """Starts agents that fail with one line of text."""

    def __init__(self) -> None:
        self.starts: list[Failed] = []

    def start(self, machines: Sequence[str], line: str, show: Show) -> Failed:
        reader, writer = os.pipe()
        os.write(writer, b"ssh: no route\n")
        os.close(writer)
        show(0, reader, 2)
        self.starts.append(Failed())
        return self.starts[-1]


def test_an_elastic_job_keeps_and_shows_one_failed_start_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner()
    monkeypatch.setattr(machines, "runner_of", lambda name, command: runner)
    monkeypatch.setattr(machines, "_address", lambda *_: "127.0.0.1")
    err = io.BytesIO()
    hosts = [Host("m0", (0,)), Host("m1", (0,))]
    launcher = machines.Launcher(Job("train.py", nodes="1:2"), hosts, Terminal(io.BytesIO()), Terminal(err))
    try:
        launcher.start()
        for _ in range(50):
            launcher.start([1])
            errors = launcher.machines[1].errors
            assert errors is not None and errors.closed.wait(10)
        assert len(launcher._starts) == 2
        assert [one.closed for one in runner.starts] == [False, *[True] * 49, False]
        assert launcher.machines[1].start is not None and launcher._ended()[1] == "ended with exit code 255"
    finally:
        launcher.close()
    assert err.getvalue().count(b"no route") == 2  # of each machine
