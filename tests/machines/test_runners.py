"""Every way to start agents on several machines: real pdsh, Open MPI, MPICH and Slurm."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys

import pytest

from tests.machines.lab import Lab
from tests.machines.losses import STEPS, steps_of
from tests.machines.test_ssh import nothing_left, places, running
from tests.machines.test_training import one_machine

pytestmark = pytest.mark.limit(200)

PROGRAMS = {"pdsh": "pdsh", "openmpi": "mpirun.openmpi", "mpich": "mpiexec.hydra", "slurm": "srun"}


def options(lab: Lab, name: str) -> tuple[list[str], dict[str, str]]:
    """Return options of `shardwise run` and variables with which a program finds the lab's machines."""
    if shutil.which(PROGRAMS[name]) is None:
        pytest.skip(f"there is no {PROGRAMS[name]}")
    variables = {key: value for key, value in os.environ.items() if key != "GLOO_SOCKET_IFNAME"}
    ssh = " ".join(lab.ssh)
    if name == "pdsh":
        return [], {**variables, "PDSH_SSH_ARGS_APPEND": ssh}
    if name == "openmpi":
        return ["--launcher-args", f"--allow-run-as-root --mca plm_rsh_args '{ssh}'"], variables
    if name == "mpich":
        wrapper = lab.folder / "ssh"
        wrapper.write_text(f'#!/bin/sh\nexec ssh {ssh} "$@"\n')
        wrapper.chmod(0o755)
        return ["--launcher-args", f"-launcher ssh -launcher-exec {wrapper}"], variables
    found = lab.slurm()
    return [], {key: value for key, value in found.items() if key != "GLOO_SOCKET_IFNAME"}


@pytest.mark.parametrize("name", PROGRAMS)
def test_ranks_meet_failures_are_named_and_signals_end_all(lab: Lab, name: str) -> None:
    more, variables = options(lab, name)
    variables["TORCH_CPP_LOG_LEVEL"], variables["OMP_NUM_THREADS"] = "ERROR", "1"
    command = [sys.executable, "-m", "shardwise.launch", "run", "--launcher", name, *more]
    hosts = ["-H", str(lab.hostfile(1)), "--max-restarts", "1", str(lab.folder / "train.py")]
    process = lab.start(0, [*command, *hosts, "fail", "0"], env=variables)
    out, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    assert places(out) == sorted(2 * [[rank, 0, rank, 6] for rank in range(3)])
    assert "rank 1 failed first (exit code 1); starting all 3 processes again on 3 machines" in err
    process = lab.start(0, [*command, *hosts, "sleep", "0"], env=variables)
    running(process, 3)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 143, err
    assert nothing_left(lab)


@pytest.mark.parametrize("name", ["openmpi", "mpich", "slurm"])
def test_ranks_that_the_program_starts_itself_train_with_the_bits_of_one_machine(lab: Lab, name: str) -> None:
    more, variables = options(lab, name)
    variables["OMP_NUM_THREADS"] = "1"
    if name != "slurm":  # which says where ranks meet
        variables["MASTER_ADDR"] = lab.name(1)
    passed = ("MASTER_ADDR", "OMP_NUM_THREADS", "PYTHONPATH")
    start = {
        "openmpi": ["mpirun.openmpi", "-np", "2", "--host", "m1:1,m2:1", *(w for key in passed for w in ("-x", key))],
        "mpich": ["mpiexec.hydra", "-n", "2", "-hosts", "m1,m2", "-ppn", "1", "-genvlist", ",".join(passed)],
        "slurm": ["srun", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--nodelist=m1,m2"],
    }[name]
    given = shlex.split(more[1]) if more else []
    process = lab.start(0, [*start, *given, sys.executable, STEPS, "3", "5", "0"], env=variables)
    out, err = process.communicate(timeout=90)
    assert process.returncode == 0, out + err
    found = steps_of(out)
    assert len(found) == 5 and found == one_machine(2, 3, 5)
    assert nothing_left(lab)
