"""Jobs whose machines come by themselves, as parts on this machine."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from shardwise.errors import CommandLineError
from shardwise.launch.job import Job, check
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes": "2"}, "--nnodes 2: the machines are not known"),
        ({"nodes": "3:2"}, "1 <= MIN <= MAX"),
        ({"nodes": "two"}, "give a number of machines, or MIN:MAX"),
        ({"node_rank": 0, "nodes": "2", "master_addr": "192.0.2.1"}, "not an address of this machine"),
        ({"node_rank": -2, "nodes": "2", "master_addr": "192.0.2.1"}, "give 0 or more"),
        ({"node_rank": 1, "hostfile": "hosts"}, "Leave out --hostfile"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, str | int], message: str) -> None:
    with pytest.raises(CommandLineError, match=message):
        check(Job(__file__, **options))  # type: ignore[arg-type]


def test_a_machine_without_the_secret_is_told_where_to_copy_it_from(tmp_path: Path) -> None:
    words = Parts(tmp_path).words(1, "2")
    done = run_job(*words, without=HIDDEN, XDG_CONFIG_HOME=str(tmp_path))
    assert done.returncode == 2 and f"{tmp_path}/shardwise/secret does not exist. Copy it" in done.stderr
