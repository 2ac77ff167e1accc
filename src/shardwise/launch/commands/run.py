"""`shardwise run`: start a script as several processes on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from shardwise.launch.job import Job, run_job
from shardwise.launch.placement import Resources


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
    )(run)


def run(
    script: Annotated[str, typer.Argument(help="Script to run.", metavar="SCRIPT")],
    args: Annotated[
        list[str] | None,
        typer.Argument(help="Everything after the script is the script's.", metavar="[ARGS]..."),
    ] = None,
    nproc: Annotated[
        int | None,
        typer.Option(
            "--nproc",
            "--num-gpus",
            "--num-accelerators",
            metavar="N",
            help="Number of processes. Default: one for each visible CUDA device, or one.",
        ),
    ] = None,
    num_nodes: Annotated[
        int | None,
        typer.Option(metavar="N", help="Use the first N machines; only 1 is supported."),
    ] = None,
    include: Annotated[
        str, typer.Option("--include", "-i", metavar="SPEC", help="Slots to use: NAME[:slot,slot]@NAME...")
    ] = "",
    exclude: Annotated[
        str, typer.Option("--exclude", "-e", metavar="SPEC", help="Slots not to use, in the same form.")
    ] = "",
    hostfile: Annotated[
        str | None,
        typer.Option("--hostfile", "-H", metavar="PATH", help="Machines, one a line: `host slots=N`."),
    ] = None,
    master_addr: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address of this machine for the rendezvous.")
    ] = "127.0.0.1",
    master_port: Annotated[
        int | None,
        typer.Option(metavar="PORT", help="Port of the rendezvous. Default: 29500, or any free one."),
    ] = None,
    module: Annotated[bool, typer.Option("--module", help="SCRIPT is a module: python -m SCRIPT.")] = False,
    no_python: Annotated[
        bool, typer.Option("--no-python", help="SCRIPT is an executable, not a Python script.")
    ] = False,
    local_rank: Annotated[
        bool,
        typer.Option("--local-rank/--no-local-rank", help="Append --local_rank=N to the script's arguments, or not."),
    ] = False,
    max_restarts: Annotated[
        int, typer.Option(metavar="K", help="After a failure start all processes again, up to K times.")
    ] = 0,
    min_nproc: Annotated[
        int | None,
        typer.Option(
            metavar="M",
            help="Restart without a slot whose process has failed first twice in a row, down to M "
            "processes. Default: always restart all.",
        ),
    ] = None,
    bind_cores: Annotated[
        bool,
        typer.Option(
            "--bind-cores",
            "--bind-cores-to-rank",
            help="Divide this machine's cores among the processes, and bind each process to its share.",
        ),
    ] = False,
    core_list: Annotated[
        str | None,
        typer.Option("--core-list", "--bind-core-list", metavar="LIST", help="Bind, and to these CPUs only: 0,4-6."),
    ] = None,
    log_dir: Annotated[
        str | None,
        typer.Option(
            "--log-dir",
            "--enable-each-rank-log",
            metavar="DIR",
            help="Also write the output to DIR/rank_N.out and DIR/rank_N.err (appending).",
        ),
    ] = None,
    tag_output: Annotated[
        str,
        typer.Option(
            metavar="auto|always|never",
            help="Lines that get `[rank N]` in front. auto: all, but on a terminal not those of rank 0.",
        ),
    ] = "auto",
    grace: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Time to end after SIGTERM or Ctrl-C, before SIGKILL. Default: 60 where the ranks handle SIGTERM "
            "(to save a checkpoint), else 5.",
        ),
    ] = None,
    device_limit: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory limit of each rank's device, as the library counts it, such as 2GiB. Overrules "
            "memory_limits.device of the configuration.",
        ),
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print only the script's output, warnings and errors.")
    ] = False,
) -> None:
    """Run SCRIPT as several processes on this machine, and end with the code of the first that fails."""
    job = Job(
        script=script,
        args=tuple(args or ()),
        resources=Resources(nproc, num_nodes, include or None, exclude or None, hostfile),
        master_addr=master_addr,
        master_port=master_port,
        module=module,
        no_python=no_python,
        local_rank=local_rank,
        max_restarts=max_restarts,
        min_nproc=min_nproc,
        bind_cores=bind_cores,
        core_list=core_list,
        log_dir=log_dir,
        quiet=quiet,
        tags=tag_output,  # type: ignore[arg-type]  # checked with the rest of the job
        grace=grace,
        device_limit=device_limit,
        progress="off" if quiet else "auto",
    )
    raise typer.Exit(run_job(job))
