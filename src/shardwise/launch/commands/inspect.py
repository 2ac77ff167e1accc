"""`shardwise inspect`: shows the content of a checkpoint, and whether it is complete."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.units import format_size

if TYPE_CHECKING:
    from rich.console import Console

_SHOWN = 8
"""Maximum number of names in a line; the others are counted."""


def register(app: typer.Typer) -> None:
    """Add the subcommand."""
    app.command("inspect")(inspect)


def inspect(
    checkpoint: Annotated[
        str, typer.Argument(help="A checkpoint, a directory of checkpoints, or other weights.", metavar="CKPT")
    ],
    tag: Annotated[
        str | None,
        typer.Option("--tag", "-t", help="Checkpoint of a directory of checkpoints."),
    ] = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Compare every byte with its checksum.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
) -> None:
    """Show the content of CKPT; the exit code is 1 if it cannot be loaded, or if --verify finds damage."""
    from shardwise.errors import CheckpointError
    from shardwise.launch.console import must_exist

    try:
        must_exist(checkpoint)
        from shardwise.checkpoint.inspection import describe

        found = describe(checkpoint, tag=tag, tensors=tensors)
    except CheckpointError as error:
        if not as_json:
            raise
        typer.echo(json.dumps({"path": checkpoint, "ok": False, "error": str(error)}, indent=2))
        raise typer.Exit(1) from None
    errors = _errors(found)
    if verify:
        errors += _verify(found)
    if as_json:
        checked = {"verified": verify, "ok": not errors, "errors": errors}
        typer.echo(json.dumps({**found, **checked}, indent=2))
    else:
        _SHOW[found["what"]](found)
        if verify and not errors:
            typer.echo("every checksum is right")
        for line in errors:
            typer.echo(f"shardwise: error: {line}", err=True)
    if errors:
        raise typer.Exit(1)


def _errors(found: dict[str, Any]) -> list[str]:
    listed = [entry["error"] for entry in found.get("checkpoints", []) if not entry["complete"]]
    if "latest_error" in found:
        listed.append(found["latest_error"])
    latest = found.get("latest")
    if latest is not None and all(entry["tag"] != latest for entry in found["checkpoints"]):
        listed.append(f"{found['path']}: 'latest' names {latest!r}, which is not there")
    return listed


def _verify(found: dict[str, Any]) -> list[str]:
    from shardwise.checkpoint.inspection import check
    from shardwise.errors import CheckpointError
    from shardwise.launch.console import Bar

    if found["what"] == "weights":
        raise CheckpointError(f"{found['path']}: {found['format']} files have no checksums that could be verified")
    if found["what"] == "checkpoint":
        paths = [found["path"]]
    else:
        paths = [f"{found['path'].rstrip('/')}/{entry['tag']}" for entry in found["checkpoints"] if entry["complete"]]
    damaged = []
    for path in paths:
        try:
            with Bar(f"verifying {path}") as bar:
                check(path, progress=bar.show)
        except CheckpointError as error:
            damaged.append(str(error))
    return damaged


def _show_run(found: dict[str, Any]) -> None:
    from shardwise.launch.console import output, table

    console = output()
    rows = table("tag", "saved", "step", "ranks", "stage", "dtype", "size", "", numbers=("step", "ranks", "size"))
    for entry in found["checkpoints"]:
        mark = "latest" if entry["tag"] == found["latest"] else ""
        if not entry["complete"]:
            rows.add_row(entry["tag"], "", "", "", "", "", "", f"{mark} not complete".strip())
            continue
        layout = entry["layout"]
        rows.add_row(
            entry["tag"],
            entry["created"],
            str(entry["counters"].get("global_steps", "")),
            str(layout.get("world", "")),
            str(layout.get("stage", "")),
            str(layout.get("dtype", "")),
            format_size(entry["bytes"]),
            mark,
        )
    console.print(rows)
    for name in found["leftovers"]:
        console.print(f"{name}: a save that was interrupted or is going on")


def _show_checkpoint(found: dict[str, Any]) -> None:
    from shardwise.launch.console import output, table

    console = output()
    facts = table("", "")
    facts.show_header = False
    versions, counters = found["versions"], found["counters"]
    facts.add_row("tag", found["tag"])
    facts.add_row("saved", found["created"])
    facts.add_row("by", ", ".join(f"{name} {version}" for name, version in versions.items()))
    layout = {name: found["layout"][name] for name in ("world", "stage", "dtype") if name in found["layout"]}
    facts.add_row("layout", ", ".join(f"{name} {value}" for name, value in {**layout, **found["layout"]}.items()))
    facts.add_row("counters", ", ".join(f"{name} {value}" for name, value in counters.items()))
    frozen = found["parameters"] - found["trained_parameters"]
    facts.add_row("parameters", f"{found['parameters']:,}" + (f" ({frozen:,} frozen)" if frozen else ""))
    if found["tied"]:
        facts.add_row("tied", _names([" = ".join(names) for names in found["tied"]]))
    if found["excluded"]:
        facts.add_row("left out", _names(found["excluded"]))
    if found["optimizer"] is not None:
        facts.add_row("optimizer", f"{found['optimizer']['class']} ({', '.join(found['optimizer']['state'])})")
        for number, group in enumerate(found["optimizer"]["groups"]):
            settings = ", ".join(f"{name} {value}" for name, value in group["settings"].items() if value is not None)
            facts.add_row(f"group {number}", f"{group['tensors']} tensors: {settings}")
    also = [name for name, there in (("schedule", found["scheduler"]), ("loss scaler", found["loss_scaler"])) if there]
    facts.add_row("also", ", ".join([*also, f"state of {_count(found['ranks'], 'rank')}"]))
    if found["client_state"]:
        facts.add_row("client_state", _names(found["client_state"]))
    facts.add_row("size", f"{format_size(found['bytes'])} in {_count(len(found['files']), 'file')}")
    console.print(facts)
    _show_kinds(console, found)


def _show_weights(found: dict[str, Any]) -> None:
    from shardwise.launch.console import output

    console = output()
    console.print(f"{found['path']}: {found['format']}, {format_size(found['bytes'])}")
    _show_kinds(console, found)


def _show_kinds(console: Console, found: dict[str, Any]) -> None:
    from shardwise.launch.console import table

    kinds = table("kind", "tensors", "elements", "bytes", "dtype", numbers=("tensors", "elements", "bytes"))
    for row in found["kinds"]:
        kinds.add_row(
            row["kind"],
            f"{row['tensors']:,}",
            f"{row['elements']:,}",
            format_size(row["bytes"]),
            ", ".join(row["dtypes"]),
        )
    console.print(kinds)
    if "tensors" in found:
        listed = table("tensor", "kind", "shape", "dtype", "bytes", "", numbers=("bytes",))
        for tensor in found["tensors"]:
            listed.add_row(
                tensor["name"],
                tensor["kind"],
                _shape(tensor["shape"]),
                tensor["dtype"],
                format_size(tensor["bytes"]),
                _remarks(tensor),
            )
        console.print(listed)


def _remarks(tensor: dict[str, Any]) -> str:
    found = []
    slices = tensor.get("slices", [])
    if slices:
        files = len({part["file"] for part in slices})
        found.append(_count(len(slices), "slice") + (f" in {_count(files, 'file')}" if len(slices) > 1 else ""))
    if tensor["aliases"]:
        found.append("tied with " + ", ".join(tensor["aliases"]))
    if tensor["trainable"] is False:
        found.append("frozen")
    if tensor.get("rank") is not None:
        found.append(f"of rank {tensor['rank']}")
    return "; ".join(found)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number:,} {what}s"


def _shape(shape: list[int]) -> str:
    return " x ".join(map(str, shape)) if shape else "scalar"


def _names(names: list[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f", and {rest} more" if rest > 0 else "")


_SHOW = {"run": _show_run, "checkpoint": _show_checkpoint, "weights": _show_weights}
