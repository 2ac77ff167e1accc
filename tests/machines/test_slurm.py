"""Jobs that `shardwise run --slurm` submits to a real Slurm."""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.machines.lab import Lab
from tests.machines.test_ssh import nothing_left, places

pytestmark = pytest.mark.limit(200)

SAVES = """
import os, signal, sys, time
def save(*_):
    time.sleep(1.0)
    print("saved", os.environ["RANK"], flush=True)
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
print("place", os.environ["RANK"], flush=True)
time.sleep(60)
"""


WAITS = """
import os, pathlib, sys, time
rank, count = os.environ["RANK"], os.environ["WORLD_SIZE"]
print("place", rank, "of", count, flush=True)
while not pathlib.Path(sys.argv[0]).with_name("go").exists():
    time.sleep(0.2)
print("over", rank, flush=True)
"""


class Cluster:
    """Slurm on the machines of the lab."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self._lab, self._folder = lab, folder
        hidden = {key: value for key, value in lab.slurm().items() if key != "GLOO_SOCKET_IFNAME"}
        self._variables = {**hidden, "TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}

    def do(self, *command: str) -> tuple[int, str, str]:
        """Run a command on machine 0; return its exit code, output and errors."""
        process = self._lab.start(0, command, env=self._variables, cwd=self._folder)
        out, err = process.communicate(timeout=90)
        return process.returncode, out, err

    def submit(self, *options: str) -> tuple[int, str, Path, str]:
        """Submit a job; return the exit code, its number, the file of its output, and the errors."""
        code, out, err = self.do(sys.executable, "-m", "shardwise.launch", "run", "--slurm", *options)
        found = re.fullmatch(r"Submitted as job (\d+) of Slurm; its output goes to (.*)\n", out)
        assert found is not None, out + err
        return code, found[1], Path(found[2]), err

    def until(self, path: Path, text: str) -> str:
        """Wait for a text in a file; return all of it."""
        deadline = time.monotonic() + 60
        while not path.exists() or text not in path.read_text():
            assert time.monotonic() < deadline, path.read_text() if path.exists() else self.do("squeue", "-l")
            time.sleep(0.1)
        return path.read_text()

    def nodes(self, state: str, count: int = 1) -> None:
        """Wait until some nodes are in a state."""
        deadline = time.monotonic() + 90
        while int(self.do("sinfo", "-h", "-t", state, "-o", "%D")[1].strip() or 0) < count:
            assert time.monotonic() < deadline, self.do("sinfo", "-l")[1]
            time.sleep(0.5)


@pytest.fixture(scope="module")
def cluster(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if shutil.which("sbatch") is None:
        pytest.skip("there is no sbatch")
    yield Cluster(lab, tmp_path_factory.mktemp("slurm"))


def test_a_job_of_two_nodes_is_submitted_and_its_exit_code_comes_back(lab: Lab, cluster: Cluster) -> None:
    options = ["--nnodes", "2", "--nproc", "2", "--time", "5", "--sbatch-args", "--wait", "--max-restarts", "1"]
    script = str(lab.folder / "train.py")
    code, _, output, err = cluster.submit(*options, script, "fail", "0")
    text = output.read_text()
    assert code == 0, err + text
    assert places(text) == sorted(2 * [[0, 0, 0, 10], [1, 1, 0, 10], [2, 0, 1, 10], [3, 1, 1, 10]])
    code, _, output, _ = cluster.submit(*options, script, "fail", "0", "1")
    assert code == 1 and "ValueError: bad batch" in output.read_text()
    assert nothing_left(lab)


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_signal_before_the_time_limit_lets_all_ranks_save(lab: Lab, cluster: Cluster, nodes: int) -> None:
    script = lab.folder / "saves.py"
    script.write_text(SAVES)
    _, number, output, _ = cluster.submit("--nnodes", str(nodes), "--nproc", "1", str(script))
    cluster.until(output, f"place {nodes - 1}")
    assert cluster.do("scancel", "--signal", "TERM", "--batch", number)[0] == 0
    text = cluster.until(output, f"saved {nodes - 1}")
    assert all(f"saved {rank}" in text for rank in range(nodes))
    deadline = time.monotonic() + 30
    while "ExitCode=143:0" not in (shown := cluster.do("scontrol", "show", "job", number)[1]):
        assert time.monotonic() < deadline, shown + output.read_text()
        time.sleep(0.1)
    assert "Requeue=1" in shown and nothing_left(lab)


def test_a_job_goes_on_without_a_lost_node(lab: Lab, cluster: Cluster) -> None:
    """It still runs when Slurm has noticed the loss, which would end a job without --no-kill."""
    script = lab.folder / "waits.py"
    script.write_text(WAITS)
    options = ("--nnodes", "2:3", "--nproc", "1", "--max-restarts", "1", "--sbatch-args", "--nodes 3")
    _, number, output, _ = cluster.submit(*options, str(script))  # not two nodes, because one is not ready yet
    cluster.until(output, "place 2 of 3")
    lab.link(3, False)
    try:
        text = cluster.until(output, "place 1 of 2")
        assert "machine m3 (rank 2) is lost: no message for 6 s; starting all 2 processes again on 2 machines" in text
        cluster.nodes("down")
        assert "JobState=RUNNING" in cluster.do("scontrol", "show", "job", number)[1]
        (lab.folder / "go").touch()
        cluster.until(output, "over 1")
    finally:
        lab.link(3, True)
        cluster.nodes("idle", lab.count)
    assert "JobState=COMPLETED" in cluster.do("scontrol", "show", "job", number)[1] and nothing_left(lab)


def test_what_slurm_refuses_is_one_message(lab: Lab, cluster: Cluster) -> None:
    command = [sys.executable, "-m", "shardwise.launch", "run", "--slurm", "--nproc", "1"]
    script = str(lab.folder / "train.py")
    code, out, err = cluster.do(*command, "--sbatch-args", "--partition nowhere", script)
    assert code == 1 and not out and "error: sbatch has refused the job (exit code 1)" in err
    assert "invalid partition specified: nowhere" in err
    code, _, output, _ = cluster.submit("--nproc", "1", "--sbatch-args", "--wait --nodes 2", "--nnodes", "3", script)
    assert code == 2 and "--nnodes 3: the allocation has only 2 nodes: m1, m2" in output.read_text()
    code, _, err = cluster.do("srun", "--ntasks", "2", *command, script)
    assert code == 2 and "srun has started this command 2 times" in err
