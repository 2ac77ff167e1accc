"""`shardwise doctor`: shows installed versions, and the package that `import deepspeed` imports."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from shardwise.launch.detect import Detected


def register(app: typer.Typer) -> None:
    """Add the subcommand."""
    app.command("doctor")(doctor)


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
) -> None:
    """Show versions, devices, and which package `deepspeed` is imported; exit code 1 if that is ambiguous."""
    raise typer.Exit(show(as_json))


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
