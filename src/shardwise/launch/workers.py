"""Command and environment of the ranks of a job."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import sys
from collections.abc import Mapping

from shardwise.comm.environment import DEVICE_LIMIT, MEMORY_DIRECTORY, PROGRESS, RECOVERY_FILE
from shardwise.launch.facts import named
from shardwise.launch.interfaces import VARIABLES
from shardwise.launch.job import Job
from shardwise.launch.placement import Placement
from shardwise.launch.runners import local_shell


def worker_command(job: Job, local_rank: int) -> list[str]:
    """Return program and arguments of one rank."""
    if job.no_python:
        # Resolve a bare name on the search path; otherwise it is a file here.
        program = [shutil.which(job.script) or job.script]
    else:
        # Unbuffered, because buffered output is late, and lost when the process is killed.
        program = [job.python or sys.executable, "-u", *(["-m"] if job.module else []), job.script]
    command = [*program, *job.args, *([f"--local_rank={local_rank}"] if job.local_rank else [])]
    if job.setup is None:
        return command
    # Without arguments of the shell, because a sourced script would see them as its own.
    return [local_shell(), "-c", f". {shlex.quote(os.path.abspath(job.setup))} && exec {shlex.join(command)}"]


def worker_environment(
    job: Job,
    placement: Placement,
    env: Mapping[str, str] = os.environ,
    cores: int | None = None,
    interface: str = "lo",
) -> dict[str, str]:
    """Return the launcher's environment with devices, threads (for bound `cores`) and the job's network interface."""
    # Variables of an outer launcher are not for these ranks.
    variables = {name: value for name, value in env.items() if name not in (MEMORY_DIRECTORY, RECOVERY_FILE)}
    variables |= named(job.export, env)
    if placement.devices is not None:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(placement.devices)
    if job.device_limit is not None:
        variables[DEVICE_LIMIT] = job.device_limit
    if job.progress == "off":
        variables[PROGRESS] = "off"
    elif job.progress is not None:
        variables.setdefault(PROGRESS, job.progress)
    if job.quiet:
        variables.setdefault("SHARDWISE_LOG_LEVEL", "warning")
    # By default torch uses all cores in each process.
    variables.setdefault("OMP_NUM_THREADS", str(cores or max(1, len(os.sched_getaffinity(0)) // placement.nproc)))
    if any(name == interface for _, name in socket.if_nameindex()):
        # NCCL finds the interface of loopback only if it is named; on one machine it needs none.
        for name in VARIABLES if interface != "lo" else VARIABLES[:1]:
            variables.setdefault(name, interface)
    return variables
