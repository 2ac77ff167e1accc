"""Jobs of Slurm: `shardwise run --slurm` submits itself, and in an allocation starts the ranks on its nodes."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from shardwise.errors import CommandLineError, LaunchError
from shardwise.launch.agent import SAVING_GRACE_S
from shardwise.launch.job import Job, command_line, split_arguments
from shardwise.launch.placement import Host, check_resources

MARGIN_S = 30
"""Seconds between the end of the grace period and the time limit, for the end of agents and srun."""

_LONGEST_S = 65535  # of sbatch's --signal
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<parts>\d+(?::\d+){0,2})")


def check(job: Job) -> None:
    """Check the options of Slurm. Raises CommandLineError with option, value and fix."""
    if not job.slurm:
        for option, given in (
            ("--sbatch-args", job.sbatch_args),
            ("--time", job.time),
            ("--dry-run", job.dry_run),
        ):
            if given:
                raise CommandLineError(f"{option} is for jobs of Slurm: give --slurm too.")
        return
    for option, value in (
        ("--hostfile", job.hostfile),
        ("--include", job.include),
        ("--exclude", job.exclude),
        ("--node-rank", job.node_rank),
    ):
        if value is not None:
            raise CommandLineError(
                f"{option} {value}: with --slurm the nodes are those of the allocation. Leave it out; sbatch chooses "
                "nodes by --sbatch-args, such as `--nodelist` or `--exclude`."
            )
    check_resources(job.resources)
    if job.launcher not in ("ssh", "slurm"):
        raise CommandLineError(f"--launcher {job.launcher}: with --slurm srun starts the ranks. Leave it out.")
    if job.machines is not None and job.machines[1] is None:
        raise CommandLineError(f"--nnodes {job.nodes}: sbatch needs the largest number of nodes too: MIN:MAX.")
    if any(not one.isprintable() for one in job.sbatch_args):
        raise CommandLineError("--sbatch-args: expected one line of printable characters.")
    split_arguments(job.sbatch_args, "--sbatch-args")
    limit = None if job.time is None else seconds_of(job.time)
    lead = _lead(job)
    if lead > _LONGEST_S:
        raise CommandLineError(f"--grace {job.grace}: with --slurm at most {_LONGEST_S - MARGIN_S} seconds.")
    if limit is not None and limit <= lead:
        raise CommandLineError(
            f"--time {job.time}: SIGTERM comes {lead} s before the limit ({MARGIN_S} s more than --grace), at once. "
            "Give a longer time, or a shorter --grace."
        )


def seconds_of(time: str) -> int:
    """Return the seconds of a time limit in Slurm's form. Raises CommandLineError.

    >>> seconds_of("90"), seconds_of("1:30:00"), seconds_of("2-12"), seconds_of("5:30")
    (5400, 5400, 216000, 330)
    """
    match = _TIME.fullmatch(time)
    if match is None:
        raise CommandLineError(
            f"--time {time}: expected MINUTES, MINUTES:SECONDS, HOURS:MINUTES:SECONDS or DAYS-HOURS."
        )
    parts = [int(part) for part in match["parts"].split(":")]
    if match["days"] is None:  # the last part is seconds, or minutes if it is the only one
        hours, minutes, seconds = [0, *parts, 0] if len(parts) == 1 else [0, *parts][-3:]
    else:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    return ((int(match["days"] or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def script(job: Job) -> str:
    """Return the batch script of a job; in the allocation it runs the command again, which then starts the ranks."""
    name = job.script if job.module else Path(job.script).stem
    least, most = job.machines or (1, 1)
    options = [
        f"--job-name={name}",
        f"--nodes={least}" if least == most else f"--nodes={least}-{most}",
        *([] if least == most else ["--no-kill"]),  # the allocation outlives a lost node
        "--ntasks-per-node=1",  # the agent, which starts the ranks
        *([] if job.nproc is None else [f"--cpus-per-task={job.nproc}"]),
        *([] if job.time is None else [f"--time={job.time}"]),
        f"--signal=B:TERM@{_lead(job)}",
        "--requeue",
        "--open-mode=append",  # the output of a requeued job stays
    ]
    lines = [f"#SBATCH {shlex.quote(option)}" for option in options]
    if job.sbatch_args:
        lines.append(f"#SBATCH {shlex.join(split_arguments(job.sbatch_args, '--sbatch-args'))}")  # the last one counts
    # The ranks of one node have the variables of this script; agents on several source the script themselves.
    again = None if most == 1 else job.setup
    inner = command_line(dataclasses.replace(job, sbatch_args="", time=None, dry_run=False, setup=again))
    setup = [] if job.setup is None else [f". {shlex.quote(job.setup)}"]
    # The launcher takes the place of the shell, because Slurm sends SIGTERM to the shell only.
    command = shlex.join([job.python or sys.executable, "-m", "shardwise.launch", "run", *inner])
    return "\n".join(["#!/bin/bash", *lines, *setup, f"exec {command}", ""])


def submit(job: Job) -> int:
    """Submit a job, or only print its script, and return the exit code: 0, or with sbatch's `--wait` that of the job.

    Raises LaunchError if sbatch is missing or refuses the job.
    """
    text = script(job)
    if job.dry_run:
        print(text, end="")
        return 0
    if shutil.which("sbatch") is None:
        raise LaunchError(
            "--slurm: there is no program sbatch here. Start the command on a login node of the cluster; --dry-run "
            "prints the script."
        )
    pipe = subprocess.PIPE
    process = subprocess.Popen(["sbatch", "--parsable"], stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(BrokenPipeError):  # sbatch has ended; the reason is in its errors
        process.stdin.write(text)
        process.stdin.close()
    process.stdin = None
    number = process.stdout.readline().strip().partition(";")[0]  # NUMBER;CLUSTER
    if number:
        print(f"Submitted as job {number} of Slurm; its output goes to {_output_of(number)}", flush=True)
    errors = process.communicate()[1].strip()
    if not number:
        raise LaunchError(f"sbatch has refused the job (exit code {process.returncode}): {errors}")
    if errors:
        print(errors, file=sys.stderr)
    return process.returncode


def allocated(job: Job) -> list[Host] | None:
    """Return the nodes of the allocation that this command is in, at most the largest number that the job can use,
    without slots; None outside of one.

    Raises:
        CommandLineError: srun has started this command several times, or there are fewer nodes than requested.
        LaunchError: Slurm does not name the nodes.
    """
    if "SLURM_JOB_ID" not in os.environ:
        return None
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks != "1":
        raise CommandLineError(
            f"srun has started this command {tasks} times, but `shardwise run --slurm` starts the ranks of all nodes. "
            "Start it once, without srun; or start the script itself by srun."
        )
    names = _ask("scontrol", "show", "hostnames", os.environ.get("SLURM_JOB_NODELIST", "")).split()
    least, most = job.machines or (1, None)
    if least > len(names):
        raise CommandLineError(f"--nnodes {job.nodes}: the allocation has only {len(names)} nodes: {', '.join(names)}.")
    return [Host(name, ()) for name in names[:most]]


def _lead(job: Job) -> int:
    return math.ceil(SAVING_GRACE_S if job.grace is None else job.grace) + MARGIN_S


def _output_of(number: str) -> str:
    try:
        found = re.search(r"^\s*StdOut=(.*)$", _ask("scontrol", "show", "job", number), re.MULTILINE)
    except LaunchError:
        found = None
    return found[1] if found else f"the file that `scontrol show job {number}` shows"


def _ask(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except OSError as error:
        raise LaunchError(f"--slurm: cannot start {command[0]}: {error.strerror}.") from error
    except subprocess.CalledProcessError as error:
        raise LaunchError(f"--slurm: {shlex.join(command)}: {error.stderr.strip()}") from error
