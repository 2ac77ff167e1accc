"""`shardwise doctor`: shows installed versions, the package that `import deepspeed` imports, and other machines."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from shardwise.launch.detect import Detected
    from shardwise.launch.job import Job


def register(app: typer.Typer) -> None:
    """Add the subcommand."""
    app.command("doctor")(doctor)


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
    hostfile: Annotated[
        str | None, typer.Option("--hostfile", "-H", metavar="PATH", help="Compare these machines instead.")
    ] = None,
    launcher: Annotated[str, typer.Option(metavar="NAME", help="As in `shardwise run`.")] = "ssh",
    launcher_args: Annotated[str, typer.Option(metavar="ARGS", help="As in `shardwise run`.")] = "",
    ssh_port: Annotated[int | None, typer.Option(metavar="PORT", help="As in `shardwise run`.")] = None,
    python: Annotated[str | None, typer.Option(metavar="PATH", help="As in `shardwise run`.")] = None,
) -> None:
    """Show versions, devices, and which package `deepspeed` is imported; exit code 1 if that is ambiguous.

    With --hostfile the machines of a job are reached and compared as before its start; exit code 1 if one cannot be
    used.
    """
    if hostfile is None:
        raise typer.Exit(show(as_json))
    from shardwise.launch.job import Job

    job = Job(
        "shardwise",
        module=True,
        hostfile=hostfile,
        launcher=launcher,
        launcher_args=launcher_args,
        ssh_port=ssh_port,
        python=python,
    )
    raise typer.Exit(show_machines(job, as_json))


def show_machines(job: Job, as_json: bool) -> int:
    """Print the facts of the machines of a hostfile and their differences, and return the exit code."""
    from shardwise.launch.console import output, table
    from shardwise.launch.machines import compare
    from shardwise.launch.placement import hosts_of
    from shardwise.units import format_size

    hosts = hosts_of(job.resources)
    assert hosts is not None
    rows, problems = compare(job, hosts)
    if as_json:
        machines = [
            {
                "name": row.name,
                "clock_ahead_s": row.ahead,
                "next_bytes_per_s": row.rate,
                "next_round_trip_s": row.trip,
                **(vars(row.facts) if row.facts else {}),
            }
            for row in rows
        ]
        typer.echo(json.dumps({"machines": machines, "problems": problems, "ok": not problems}, indent=2))
        return int(bool(problems))
    shown = table(
        *("machine", "address", "interface", "Python", "torch", "shardwise", "processes", "devices"),
        *("free memory", "free disk", "clock (s)", "link", "to the next", "round trip"),
        numbers=("processes", "free memory", "free disk", "clock (s)", "link", "to the next", "round trip"),
    )
    for name, found, ahead, rate, trip in rows:
        if found is None:
            shown.add_row(name, *["-"] * 13)
        else:
            sizes = format_size(found.memory), format_size(found.disk)
            devices = ", ".join(found.devices) or "CPU"
            versions = (found.versions[what] for what in ("Python", "torch", "shardwise"))
            shown.add_row(
                *(
                    name,
                    found.address,
                    found.interface,
                    *versions,
                    str(found.processes),
                    devices,
                    *sizes,
                    f"{ahead:+.2f}",
                    *("-" if one is None else f"{format_size(int(one))}/s" for one in (found.speed, rate)),
                    "-" if trip is None else f"{trip * 1e3:.2f} ms",
                )
            )
    output().print(shown)
    for line in problems:
        typer.echo(line)
    return int(bool(problems))


def show(as_json: bool = False) -> int:
    """Print the report of the command, and return its exit code."""
    from shardwise.launch.detect import installed

    found = installed()
    facts = _facts()
    both = len({one.kind for one in found}) > 1
    if as_json:
        packages = [vars(one) for one in found]
        typer.echo(json.dumps({**facts, "deepspeed": packages, "ok": not both}, indent=2))
    else:
        for name, value in facts.items():
            typer.echo(f"{name:<12}{value}")
        for line in _deepspeed(found):
            typer.echo(f"{'deepspeed':<12}{line}")
    return int(both)


def _facts() -> dict[str, Any]:
    import os
    import platform

    import torch

    import shardwise

    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    backends = [name for name in ("gloo", "nccl", "mpi") if torch.distributed.is_backend_available(name)]
    return {
        "shardwise": f"{shardwise.__version__} at {os.path.dirname(os.path.abspath(shardwise.__file__))}",
        "python": f"{platform.python_version()} at {sys.executable}",
        "torch": torch.__version__,
        "backends": ", ".join(backends) or "none",
        "devices": ", ".join(devices) or f"CPU with {os.cpu_count()} cores",
    }


def _deepspeed(found: list[Detected]) -> list[str]:
    names = {"drop-in": "shardwise's drop-in", "real": "DeepSpeed itself"}
    if not found:
        return ["none; the drop-in of a checkout gives shardwise: pip install ./dropin"]
    lines = [f"{names[found[0].kind]}, {found[0].version}, at {found[0].place}"]
    lines += [f"hidden by it: {names[one.kind]}, {one.version}, at {one.place}" for one in found[1:]]
    if len({one.kind for one in found}) > 1:
        lines.append("both are on the path: remove one with `pip uninstall deepspeed`, in the environment that has it")
    return lines
