"""Jobs whose machines come by themselves, as parts on this machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import LaunchError
from shardwise.launch import meeting
from shardwise.launch.interfaces import Interface
from shardwise.launch.job import Job
from shardwise.launch.placement import Devices, Host, place
from shardwise.launch.processes import handles
from tests.harness.jobs import environment, free_port, launch, run_job, script

pytestmark = pytest.mark.limit(120)

SCRIPT = """
import os, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
print("world", world, "rank", rank, "secret", "SHARDWISE_SECRET" in os.environ, flush=True)
(folder / f"{world}-{rank}-{os.environ['TORCHELASTIC_RESTART_COUNT']}").touch()
while not (folder / "end").exists():
    time.sleep(0.05)
sys.exit(int((folder / "end").read_text()))
"""


HIDDEN = ("SHARDWISE_SECRET", "GLOO_SOCKET_IFNAME")
"""Variables that jobs do not get: the loopback interface does not reach other machines."""


class Parts:
    """Parts of a job, each with one process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.parts: list[subprocess.Popen[str]] = []
        self.script, self.port = script(folder, SCRIPT), free_port()

    def words(self, rank: int, nodes: str) -> list[object]:
        """Return options, script and argument of the part of a machine."""
        place = ("--nnodes", nodes, "--node-rank", rank, "--master-addr", "127.0.0.1", "--master-port", self.port)
        return [*place, "--nproc", 1, self.script, self.folder]

    def start(self, rank: int, nodes: str, *, secret: str = "s" * 16) -> subprocess.Popen[str]:
        """Start the part of a machine."""
        env = environment(HIDDEN, SHARDWISE_SECRET=secret)
        command = launch(*self.words(rank, nodes))
        part = subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.parts.append(part)
        return part

    def wait(self, pattern: str) -> None:
        """Wait for a file of the ranks."""
        deadline = time.monotonic() + 20
        while not list(self.folder.glob(pattern)):
            if time.monotonic() > deadline:
                self.end(1)
                raise AssertionError([part.communicate()[0] for part in self.parts])
            time.sleep(0.05)

    def end(self, code: int) -> None:
        """Let the ranks exit."""
        (self.folder / "writing").write_text(str(code))
        (self.folder / "writing").rename(self.folder / "end")


def test_a_part_that_is_killed_is_left_out_and_taken_in_again(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    first, second = parts.start(0, "1:2"), parts.start(1, "1:2")
    parts.wait("2-1-0")
    second.kill()
    parts.wait("1-0-1")
    again = parts.start(1, "1:2")
    parts.wait("2-1-2")
    again.terminate()  # the machine leaves in order
    parts.wait("1-0-3")
    parts.end(0)
    said, left = first.communicate()[0], again.communicate()[0]
    assert first.returncode == 0 and again.returncode == 143, said + left
    name = socket.gethostname()
    assert "(rank 1) is lost: connection closed; starting all 1 processes again on 1 machine" in said
    assert f"machine {name}#2 has come; starting all 2 processes again on 2 machines" in said
    assert f"machine {name}#2 leaves on SIGTERM" in said and "this machine has left the job" in left
    assert "secret True" not in said + left


def test_all_parts_end_with_the_code_of_the_rank_that_failed(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    second, first = parts.start(1, "2"), parts.start(0, "2")
    stranger = parts.start(2, "2", secret="another secret 123")
    parts.wait("2-1-0")
    parts.end(7)
    for part in (first, second):
        assert "failed first" in part.communicate()[0] and part.returncode == 7
    stranger.send_signal(signal.SIGKILL)
    stranger.communicate()


def test_a_machine_without_the_secret_is_told_where_to_copy_it_from(tmp_path: Path) -> None:
    words = Parts(tmp_path).words(1, "2")
    done = run_job(*words, without=HIDDEN, XDG_CONFIG_HOME=str(tmp_path))
    assert done.returncode == 2 and f"{tmp_path}/shardwise/secret does not exist. Copy it" in done.stderr


def test_a_signal_before_the_start_is_the_exit_code(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    first = parts.start(0, "2")
    while not handles(first.pid, signal.SIGTERM):
        assert first.poll() is None
        time.sleep(0.02)
    first.terminate()
    said = first.communicate(timeout=60)[0]
    assert first.returncode == 143 and "received SIGTERM before the start of the job" in said


def by_hand(monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Job, list[Host], list[str]]:
    """Run the first part of a job whose launcher only notes its machines and its address."""
    hosts: list[Host] = []
    addresses: list[str] = []

    def run(job: Job, found: list[Host], where: tuple[str, int, bytes]) -> int:
        hosts.extend(found)
        addresses.append(where[0])
        return 0

    monkeypatch.setattr(meeting, "run_on_machines", run)
    monkeypatch.setenv(meeting.SECRET_VARIABLE, "s" * 16)
    job = Job(__file__, **{"nodes": "2", "node_rank": 0, "master_addr": "127.0.0.1", **options})
    assert meeting.meet(job) == 0
    return job, hosts, addresses


@pytest.mark.parametrize(
    ("devices", "options", "chosen"),
    [
        (Devices(tuple("01234567")), {"include": "localhost:2,3"}, ("2", "3")),
        (Devices(tuple("0123")), {"exclude": "localhost:0,2"}, ("1", "3")),
        (Devices(("2", "3"), restricted=True), {}, ("2", "3")),
        (Devices(("GPU-a", "GPU-b"), restricted=True), {"nproc": 1}, ("GPU-a",)),
    ],
)
def test_chosen_devices_are_those_of_each_machine(
    devices: Devices, options: dict[str, Any], chosen: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "find_devices", lambda: devices)
    job, (host,), _ = by_hand(monkeypatch, **options)
    assert place(job.resources, devices, host).devices == chosen


@pytest.mark.parametrize(("others", "address"), [(["10.0.0.7"], "10.0.0.7"), ([], ""), (["10.0.0.7", "10.1.0.7"], "")])
def test_a_name_with_a_loopback_address_is_not_that_of_the_launcher(
    others: list[str], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = [Interface("lo", "127.0.0.1", None, True), *(Interface("e", one, None, False) for one in others)]
    monkeypatch.setattr(meeting, "interfaces", lambda: known)
    monkeypatch.setattr(meeting, "is_this_machine", lambda name: True)
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    if address:
        assert by_hand(monkeypatch, master_addr="node0")[2] == [address]
    else:
        with pytest.raises(LaunchError, match=r"--master-addr node0 is 127\.0\.1\.1 on this machine"):
            by_hand(monkeypatch, master_addr="node0")
    assert by_hand(monkeypatch, master_addr="node0", nodes="1")[2] == ["127.0.1.1"]


def test_a_machine_that_joins_has_the_variables_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("OF_FILE", ""), ("OF_OPTION", ""), (meeting.SECRET_VARIABLE, "s" * 16)):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.chdir(tmp_path)
    Path(".shardwise_env").write_text("OF_FILE=1\n")
    found: list[str | None] = []

    def join(*_: object) -> dict[str, int]:
        found.extend(map(os.environ.get, ("OF_FILE", "OF_OPTION")))
        return {"exit_code": 0}

    monkeypatch.setattr(meeting, "_join", join)
    assert meeting.meet(Job(__file__, nodes="2", node_rank=1, master_addr="10.0.0.1", export=("OF_OPTION=2",))) == 0
    assert found == ["1", "2"]
