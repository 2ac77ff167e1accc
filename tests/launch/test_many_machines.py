"""A job of many machines, all but the first imagined: their agents are connections of one process."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from shardwise.launch import facts, reach, wire
from shardwise.launch.job import Job
from shardwise.launch.machines import command_of
from shardwise.launch.placement import find_devices, place
from shardwise.launch.processes import Exit
from shardwise.launch.workers import worker_environment
from tests.harness import thorough

SECRET = "s" * 16
KEY = hashlib.sha256(SECRET.encode()).digest()


class Machine:
    """The connection of an imagined machine; `received` counts the launcher's messages by kind."""

    def __init__(self, number: int, port: int, job: Job, known: facts.Facts) -> None:
        self.received: Counter[str] = Counter()
        self.ended = threading.Event()
        self._known = known
        connection, _ = wire.connect("127.0.0.1", port, KEY, 60.0)
        self._channel = wire.Channel(connection, self._answer, lambda reason: self.ended.set())
        self._channel.begin()
        joining = {"name": f"m{number}", "rank": number, "slots": [0], "command": command_of(job)}
        self._channel.send({"join": joining})

    def _answer(self, message: dict[str, Any]) -> None:
        kind = str(message["do"])
        self.received[kind] += 1
        if kind == "take":
            known = dataclasses.replace(self._known, clock=time.time())
            self._channel.send({"node": message["number"], "facts": dataclasses.asdict(known)})
        elif kind == "reach":
            self._tell("reached", [{"error": ""} for _ in message["machines"]])
        elif kind == "start":
            end = Exit(message["plan"]["first_rank"], 1, 0, time.time(), False)
            self._tell("finished", [dataclasses.asdict(end)])
        elif kind == "end":
            self._channel.close()
            self.ended.set()

    def _tell(self, kind: str, content: Any) -> None:
        self._channel.send({"event": kind, "content": content})


@pytest.mark.limit(120)
@pytest.mark.parametrize("count", [64, thorough(1024)])
def test_messages_and_time_of_a_start_grow_with_machines(
    tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)  # the loopback interface does not reach other machines
    script = tmp_path / "script.py"
    script.write_text("import os\nprint('world', os.environ['WORLD_SIZE'])\n")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    environment = {**os.environ, "SHARDWISE_SECRET": SECRET}
    command = [sys.executable, "-m", "shardwise.launch", "run", "--nnodes", str(count), "--node-rank", "0"]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(port), "--nproc", "1", str(script)]
    process = subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    job = Job(script=str(script), nproc=1, tags="always", progress="auto")
    answers = reach.EchoServer("127.0.0.1", KEY)
    ranks = worker_environment(job, place(job.resources, find_devices()), interface="")
    known = facts.facts_of(job, ranks, address="127.0.0.1", port=answers.port, processes=1)
    with socket.socket() as probe:
        while probe.connect_ex(("127.0.0.1", port)):
            assert process.poll() is None
            time.sleep(0.05)
    began = time.monotonic()
    machines = [Machine(number, port, job, known) for number in range(1, count)]
    out, err = process.communicate(timeout=100)
    answers.close()
    assert process.returncode == 0, err
    assert f"world {count}" in out
    assert all(machine.ended.wait(10) for machine in machines)
    assert all(machine.received == {"take": 1, "reach": 1, "start": 1, "end": 1} for machine in machines), [
        m.received for m in machines
    ]
    assert time.monotonic() - began < 60
