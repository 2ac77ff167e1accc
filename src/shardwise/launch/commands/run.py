"""`shardwise run`: start a script as several processes, on this machine or on several."""

from __future__ import annotations

import dataclasses

import typer

from shardwise.launch.job import Job
from shardwise.launch.options import command_of
from shardwise.launch.start import run_job


def register(app: typer.Typer) -> None:
    """Add the subcommand."""
    app.command(
        "run",
        context_settings={
            # All arguments from the script's name on belong to the script.
            "allow_interspersed_args": False,
            # --num_gpus and --num-gpus are one option.
            "token_normalize_func": lambda token: token.replace("_", "-"),
        },
    )(command_of(Job, run))


def run(job: Job) -> None:
    """Run SCRIPT as several processes, and end with the code of the first that fails."""
    raise typer.Exit(run_job(dataclasses.replace(job, progress="off" if job.quiet else "auto")))
