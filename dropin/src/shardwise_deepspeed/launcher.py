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

_FIELDS = {
    "script": "user_script",
    "nproc": "num_gpus",
    "bind_cores": "bind_cores_to_rank",
    "core_list": "bind_core_list",
    "log_dir": "enable_each_rank_log",
    "setup": "venv_script",
    **{name: name for name in ("node_rank", "include", "exclude", "hostfile", "master_addr", "master_port", "module")},
    **{name: name for name in ("no_python", "quiet", "ssh_port", "autotuning")},
}
"""Fields of a job that are the value of an option."""

_UNSET = (-1, "", "None")
"""Values with which the real command spells out that an option is not given."""

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
    fields: dict[str, Any] = {
        field: None if (value := getattr(given, name)) in _UNSET else value for field, name in _FIELDS.items()
    }
    if given.hostfile is not None and not os.path.exists(given.hostfile):
        log.warning("--hostfile %s: there is no such file; this machine is used", given.hostfile)
        fields["hostfile"] = None
    if given.no_ssh:
        fields["hostfile"] = None
    nodes = None if given.num_nodes == -1 else str(given.num_nodes)
    if given.elastic_training:
        nodes = f"{max(1, given.min_elastic_nodes)}:{given.max_elastic_nodes if given.max_elastic_nodes > 0 else ''}"
    return Job(
        args=tuple(given.user_args),
        nodes=nodes,
        local_rank=not given.no_local_rank,
        pid_file=f"/tmp/{os.getpid()}.deepspeed" if given.save_pid else None,
        progress="off" if given.quiet else None,
        launcher=RUNNERS[given.launcher],
        launcher_args=given.launcher_args,
        **fields,
    )


def main(args: list[str] | None = None) -> NoReturn:
    """Run the command and exit with its code; `args` default to those of this process."""
    run("deepspeed", lambda arguments: run_job(job_of(arguments)), args)


def fetch_hostfile(hostfile_path: str) -> dict[str, int] | None:
    """Return the numbers of slots by machine, or None without the file. Raises CommandLineError for other forms."""
    return read_hostfile(hostfile_path) if os.path.isfile(hostfile_path) else None


if __name__ == "__main__":
    main()
