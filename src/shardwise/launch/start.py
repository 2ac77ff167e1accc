"""Runs a script as a job of several processes, on this machine or on several, and returns its exit code.

Invariant: at any end of the job (a rank fails or is killed, a machine is lost, an interrupt, a signal to the launcher),
the call returns within the grace period and leaves no process behind. The exit code is that of the rank that failed
first, or 128 + the signal. A rank that hangs while no other fails is waited for, and logged.
"""

from __future__ import annotations

import dataclasses
import os

from shardwise.launch import slurm
from shardwise.launch.hosts import is_this_machine
from shardwise.launch.job import Job, by_hand, check
from shardwise.launch.placement import hosts_of


def run_job(job: Job) -> int:
    """Run the job to its end.

    Returns:
        0 (also for a job that Slurm has queued), or the exit code of the rank that failed first (128 + signal if
            killed), or 128 + the signal that ended the launcher. After a signal other than SIGINT: 137 if ranks had
            to be killed; the code of a rank that failed during shutdown.

    Raises:
        CommandLineError: an option or the script's name is wrong.
        LaunchError: the port is taken, a machine cannot be used, or processes cannot be started.
    """
    check(job)
    slurm.check(job)
    if job.autotuning is not None and not (job.slurm and "SLURM_JOB_ID" not in os.environ):
        from shardwise.launch.tuning import tune

        code, best = tune(job)
        return code if best is None or job.autotuning == "tune" else run_job(best)
    if by_hand(job):
        from shardwise.launch.meeting import meet

        return meet(job)
    if job.slurm:
        hosts = None if job.dry_run else slurm.allocated(job)
        if hosts is None:
            return slurm.submit(job)
        job = dataclasses.replace(job, launcher="slurm")
    else:
        hosts = hosts_of(job.resources)
    if hosts is not None and (len(hosts) > 1 or not is_this_machine(hosts[0].name)):
        from shardwise.launch.machines import run_on_machines

        return run_on_machines(job, hosts)
    from shardwise.launch.local import run_here

    return run_here(job)
