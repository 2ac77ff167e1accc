"""Starts agents through pdsh, srun or mpirun: one program of the cluster starts one process on each machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence

from typing_extensions import override

from shardwise.errors import LaunchError
from shardwise.launch.runners import ASSIGNMENT, AgentCommand, Runner, Show, Started, local_shell
from shardwise.launch.runners.ssh import started


def _pdsh(command: AgentCommand, machines: Sequence[str], line: str) -> list[str]:
    # pdsh passes on neither variables nor input: the job's secret is in the command, which users of the machines see.
    return [
        *("pdsh", "-S", "-N", "-R", "ssh", *command.args, "-f", str(len(machines)), "-w", ",".join(machines)),
        command.shell(f"{ASSIGNMENT}={line}"),
    ]


def _srun(command: AgentCommand, machines: Sequence[str], line: str) -> list[str]:
    count = str(len(machines))
    # Since Slurm 22.05 srun does not take the cores of a task from the batch job; the launcher deals them to the ranks.
    cores = os.environ.get("SLURM_CPUS_PER_TASK", "")
    each = ["--cpus-per-task", cores] if cores else []
    return [
        *("srun", "--nodes", count, "--ntasks", count, "--ntasks-per-node", "1", "--nodelist", ",".join(machines)),
        # Agents go on if another one or its node is lost: the launcher decides what follows.
        *("--export", "ALL", "--kill-on-bad-exit=0", "--no-kill", "--wait=0"),
        *(*each, "--cpu-bind=none", *command.args, local_shell(), "-c", command.shell()),
    ]


def _openmpi(command: AgentCommand, machines: Sequence[str], line: str) -> list[str]:
    hosts = ",".join(f"{name}:1" for name in machines)
    # Without this mpirun binds an agent, and with it all ranks of the machine, to one core.
    binding = [] if "--bind-to" in command.args else ["--bind-to", "none"]
    return [
        *("mpirun", "-np", str(len(machines)), "--host", hosts, "--stdin", "all", *binding, *command.args),
        *(local_shell(), "-c", command.shell()),
    ]


def _hydra(program: str) -> Callable[[AgentCommand, Sequence[str], str], list[str]]:
    def argv(command: AgentCommand, machines: Sequence[str], line: str) -> list[str]:
        names = ",".join(machines)
        return [
            *(program, "-genv", ASSIGNMENT, line, "-hosts", names, "-ppn", "1", *command.args),
            *("-n", str(len(machines)), local_shell(), "-c", command.shell()),
        ]

    return argv


PROGRAMS: dict[str, Callable[[AgentCommand, Sequence[str], str], list[str]]] = {
    "pdsh": _pdsh,
    "slurm": _srun,
    "openmpi": _openmpi,
    "mpich": _hydra("mpiexec.hydra"),
    "impi": _hydra("mpiexec.hydra"),
}
"""Command lines by the names of `--launcher`."""


class _Program(Started):
    def __init__(self, process: subprocess.Popen[bytes], count: int, name: str) -> None:
        self._process, self._count, self._name = process, count, name

    @override
    def ended(self) -> dict[int, str]:
        code = self._process.poll()
        return {} if code is None else dict.fromkeys(range(self._count), f"{self._name} ended with exit code {code}")

    @override
    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5.0)
        self._process.kill()


class ProgramRunner(Runner):
    """Runs one program of the cluster's software. `name` is a key of `PROGRAMS`."""

    def __init__(self, name: str, command: AgentCommand) -> None:
        self._name, self._command = name, command

    @override
    def start(self, machines: Sequence[str], line: str, show: Show) -> Started:
        argv = PROGRAMS[self._name](self._command, machines, line)
        if shutil.which(argv[0]) is None:
            raise LaunchError(f"--launcher {self._name}: there is no program {argv[0]} here. Install it, or use ssh.")
        variables = {}
        if self._name == "pdsh" and self._command.port is not None:
            given = os.environ.get("PDSH_SSH_ARGS_APPEND", "")
            variables["PDSH_SSH_ARGS_APPEND"] = f"{given} -p {self._command.port}".strip()
        if argv[0] == "mpiexec.hydra":  # which passes standard input on to the first process only
            variables[ASSIGNMENT] = line
        process = started(argv, variables, "" if self._name == "pdsh" or variables.get(ASSIGNMENT) else line, 0, show)
        return _Program(process, len(machines), argv[0])
