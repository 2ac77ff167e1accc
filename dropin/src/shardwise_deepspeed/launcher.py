"""The command `deepspeed`: its options, passed to the launcher of `shardwise run`. Options about other machines have no
effect in a job of one machine. Others are refused with the reason.
"""

from __future__ import annotations

import argparse
import logging
import os
from typing import Any, NoReturn

from shardwise.launch.hosts import read_hostfile
from shardwise.launch.job import Job
from shardwise.launch.start import run_job
from shardwise_deepspeed.logs import LEVELS
from shardwise_deepspeed.options import Parser, run

DEEPSPEED_ENVIRONMENT_NAME = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
"""File of further variables for all machines, in the current or the home directory."""

RUNNERS = {"": "ssh", "ssh": "ssh", **{name: name for name in ("pdsh", "slurm", "openmpi", "mpich", "impi")}}
"""Launchers of shardwise by DeepSpeed's names; by default the ssh client, where DeepSpeed needs pdsh."""


def job_of(arguments: list[str]) -> Job:
    """Return the job that a command line of `deepspeed` describes. Raises CommandLineError for an unknown option or a
    wrong value, NotBuiltError for an unsupported option.

    >>> job_of(["--num_gpus", "2", "train.py", "--lr", "1"]).args
    ('--lr', '1')
    """
    return job_from(Parser("deepspeed").given(arguments))


def defaults() -> dict[str, Any]:
    """Return the value of each option that is not given."""
    return {**vars(Parser("deepspeed").parse_args(["script"])), "user_script": None}


def job_from(given: argparse.Namespace) -> Job:
    """Return the job of parsed options."""
    log = logging.getLogger("shardwise")
    log.setLevel(LEVELS[given.log_level])
    hostfile = given.hostfile
    if hostfile is not None and not os.path.exists(hostfile):
        log.warning("--hostfile %s: there is no such file; this machine is used", hostfile)
        hostfile = None
    nproc = None if given.num_gpus == -1 else given.num_gpus
    nodes = None if given.num_nodes == -1 else str(given.num_nodes)
    if given.elastic_training:
        nodes = f"{max(1, given.min_elastic_nodes)}:{given.max_elastic_nodes if given.max_elastic_nodes > 0 else ''}"
    if given.no_ssh:
        hostfile = None
    return Job(
        script=given.user_script,
        args=tuple(given.user_args),
        nproc=nproc,
        nodes=nodes,
        node_rank=None if given.node_rank == -1 else given.node_rank,
        include=given.include or None,
        exclude=given.exclude or None,
        hostfile=hostfile,
        master_addr=given.master_addr or None,
        master_port=given.master_port,
        module=given.module,
        no_python=given.no_python,
        local_rank=not given.no_local_rank,
        bind_cores=given.bind_cores_to_rank,
        core_list=given.bind_core_list,
        log_dir=None if given.enable_each_rank_log == "None" else given.enable_each_rank_log,
        pid_file=f"/tmp/{os.getpid()}.deepspeed" if given.save_pid else None,
        quiet=given.quiet,
        progress="off" if given.quiet else None,
        launcher=RUNNERS[given.launcher],
        launcher_args=given.launcher_args,
        ssh_port=given.ssh_port,
        setup=given.venv_script,
        autotuning=given.autotuning or None,
    )


def main(args: list[str] | None = None) -> NoReturn:
    """Run the command and exit with its code; `args` default to those of this process."""
    run("deepspeed", lambda arguments: run_job(job_of(arguments)), args)


def fetch_hostfile(hostfile_path: str) -> dict[str, int] | None:
    """Return the numbers of slots by machine, or None without the file. Raises CommandLineError for other forms."""
    return read_hostfile(hostfile_path) if os.path.isfile(hostfile_path) else None


if __name__ == "__main__":
    main()
