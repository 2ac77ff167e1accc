"""The pods of examples/kubernetes/job.yaml as machines: their names, their process 1, and SIGTERM."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import Popen

import pytest
import torch

from tests.examples import kubernetes
from tests.machines.lab import Lab

# As a container: a name, memory and processes of its own, and the command as process 1.
CONTAINER = "hostname $1 && mount -t tmpfs tmpfs /dev/shm && shift && exec unshare --pid --fork --mount-proc $0 $@"


class Cluster:
    """Starts the pods of a job, and gives them names."""

    def __init__(self, lab: Lab, name: str, service: str) -> None:
        self.lab, self.name, self.service = lab, name, service
        self._hosts = {number: Path("/etc/netns") / lab.space(number) / "hosts" for number in (1, 2)}
        self._before = {number: path.read_text() for number, path in self._hosts.items()}

    def pod(self, index: int, command: list[str]) -> Popen[str]:
        """Start a pod on machine `index` + 1."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **kubernetes.job_variables(index)}
        environment.pop("GLOO_SOCKET_IFNAME", None)
        words = ["unshare", "--mount", "sh", "-c", CONTAINER, command[0], f"{self.name}-{index}", *command[1:]]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return self.lab.start(index + 1, words, env=environment, cwd=kubernetes.EXAMPLES, **pipes)

    def publish(self) -> None:
        """Make the names known, as the Service does after pods have started."""
        lines = [f"{self.lab.address(index + 1)} {self.name}-{index}.{self.service}\n" for index in range(2)]
        for number, path in self._hosts.items():
            path.write_text(self._before[number] + "".join(lines))

    def withdraw(self) -> None:
        """Make them unknown."""
        for number, path in self._hosts.items():
            path.write_text(self._before[number])


@pytest.fixture
def cluster(lab: Lab) -> Iterator[Cluster]:
    """A cluster without pods."""
    found = kubernetes.manifests("job.yaml")
    made = Cluster(lab, found["Job"]["metadata"]["name"], found["Service"]["metadata"]["name"])
    yield made
    made.withdraw()


def wait_for(pod: Popen[str], words: str) -> str:
    said = ""
    assert pod.stdout is not None
    for line in pod.stdout:
        said += line
        if words in line:
            return said
    raise AssertionError(said)


@pytest.mark.limit(200)
def test_pods_that_saved_on_sigterm_continue_as_if_nothing_had_happened(cluster: Cluster, tmp_path: Path) -> None:
    container = kubernetes.manifests("job.yaml")["Job"]["spec"]["template"]["spec"]["containers"][0]
    options = ("--steps=40", "--pause=0.1")
    commands = [
        kubernetes.command(container, kubernetes.job_variables(index), tmp_path / "pods", *options)
        for index in range(2)
    ]
    pods = [cluster.pod(index, command) for index, command in enumerate(commands)]
    wait_for(pods[0], "waiting for train-0.train to be a name of this machine")
    cluster.publish()
    wait_for(pods[0], "step 10 ")
    # The second pod is drained: process 1 of its container gets SIGTERM.
    first = [pid for pid in cluster.lab.processes(2) if number_inside(pid) == 1]
    assert len(first) == 1
    os.kill(first[0], 15)
    said = [pod.communicate(timeout=60)[0] for pod in pods]
    assert [pod.returncode for pod in pods] == [143, 143], said
    assert "SIGTERM: saved step" in said[0]

    pods = [cluster.pod(index, command) for index, command in enumerate(commands)]
    said = [pod.communicate(timeout=90)[0] for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], said
    assert "resumed at step" in said[0]
    alone = [sys.executable, "-m", "shardwise.launch", "run", "--nproc=2", "resumable.py", f"--out={tmp_path}/alone"]
    subprocess.run([*alone, "--steps=40", "--pause=0"], check=True, capture_output=True, cwd=kubernetes.EXAMPLES)
    expected = kubernetes.state(tmp_path / "alone" / "global_step40")
    found = kubernetes.state(tmp_path / "pods" / "resumable" / "global_step40")
    assert len(expected) > 10 and expected.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    deadline = time.monotonic() + 15
    while cluster.lab.processes(1) or cluster.lab.processes(2):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def number_inside(pid: int) -> int:
    """Return the number of a process in its innermost namespace."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[-1])
