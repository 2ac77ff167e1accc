"""`shardwise check`: checks and explains a configuration without a model, a device or a job."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from shardwise.config import Note, Resolution

UNWRAPPED = 10_000


def register(app: typer.Typer) -> None:
    """Add the subcommand."""
    app.command("check")(check)


def check(
    config: Annotated[str, typer.Argument(help="Configuration file.", metavar="CONFIG")],
    world: Annotated[int, typer.Option(metavar="N", help="Number of data-parallel ranks.")] = 1,
    full: Annotated[
        bool, typer.Option("--effective", help="Print only the effective configuration, with all defaults.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse keys that DeepSpeed ignores, as shardwise.initialize does.")
    ] = False,
) -> None:
    """Check CONFIG; print each given or chosen value with the reason, and warnings.

    Keys that DeepSpeed ignores are listed, as for a script with `import deepspeed`; with --strict they are refused.
    "auto" is replaced by the Trainer's default, or by a placeholder.
    """
    from shardwise.config import accept, assume, resolve
    from shardwise.config.export import effective
    from shardwise.errors import CommandLineError, ConfigError

    if world < 1:
        raise CommandLineError(f"--world {world}: give the number of ranks, 1 or more.")
    if full and as_json:
        raise CommandLineError("--json prints the effective configuration too. Leave --effective out.")
    try:
        document = config if strict else accept(config)
        facts, assumed = assume(document)
        resolution = resolve(document, world_size=world, facts=facts)
    except ConfigError as error:
        if not as_json:
            raise
        refusal = {"config": config, "world_size": world, "ok": False, "error": str(error)}
        typer.echo(json.dumps(refusal, indent=2))
        raise typer.Exit(1) from None
    if as_json:
        typer.echo(json.dumps(_as_dict(resolution, world, assumed), indent=2, default=str))
    elif full:
        typer.echo(json.dumps(effective(resolution), indent=2, default=str))
    else:
        _show(resolution, world, assumed)


def _as_dict(resolution: Resolution, world: int, assumed: list[Note]) -> dict[str, Any]:
    from shardwise.config.export import describe, effective

    return {
        "config": resolution.origin,
        "world_size": world,
        "ok": True,
        "effective": effective(resolution),
        "values": [row._asdict() for row in describe(resolution)],
        "warnings": list(resolution.warnings),
        "ignored": [note._asdict() for note in resolution.ignored],
        "no_effect": [note._asdict() for note in resolution.no_effect],
        "read_by_clients": [note._asdict() for note in resolution.read_by_clients],
        "assumed": [note._asdict() for note in assumed],
        "not_json": resolution.extensions,
    }


def _show(resolution: Resolution, world: int, assumed: list[Note]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from shardwise.config.export import describe

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        # For a file or a pipe nothing is wrapped.
        console = Console(highlight=False, markup=False, width=UNWRAPPED)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("key", no_wrap=True)
    for name in ("value", "source", "reason"):
        table.add_column(name, overflow="fold")
    by_client = {note.path: note for note in assumed}
    for row in describe(resolution):
        note = by_client.get(row.path)
        table.add_row(row.path, _text(row.value), row.source, row.reason if note is None else note.reason)
    console.print(table)
    for note in resolution.ignored:
        console.print(f"ignored: {note.path} = {_text(note.value)}: {note.reason}")
    for note in resolution.no_effect:
        console.print(f"no effect: {note.path} = {_text(note.value)}: {note.reason}")
    for note in resolution.read_by_clients:
        console.print(f"read by clients: {note.path} = {_text(note.value)}: {note.reason}")
    for note in assumed:
        console.print(f"assumed: {note.path}: {note.reason}")
    if resolution.extensions is not None:
        text = "other readers of JSON refuse it, such as those of the Trainer, Accelerate and Lightning"
        console.print(f"not plain JSON: {resolution.extensions}. It is read here and by DeepSpeed, but {text}")
    for line in _unsharding(resolution):
        console.print(line)
    for warning in resolution.warnings:
        console.print(f"warning: {warning}")
    console.print(f"{resolution.origin} is valid for {world} rank{'s' * (world > 1)}.")
    if resolution.ignored:
        console.print("It is so with `import deepspeed`; shardwise.initialize and --strict may refuse what is ignored.")


def _unsharding(resolution: Resolution) -> list[str]:
    """Return lines with the costs of `pipeline.unsharded_for`, which only ZeRO stage 3 with a pipeline has."""
    config = resolution.config
    settings, steps = config.pipeline, int(config.gradient_accumulation_steps or 1)
    if settings.stages in ("auto", 1) or config.zero_optimization.stage != 3:
        return []
    from shardwise.pipeline.actions import Op
    from shardwise.pipeline.lowering import with_sharding
    from shardwise.pipeline.schedules import make_schedule

    schedule = make_schedule(settings.schedule, int(settings.stages), steps, settings.chunks)
    chunks = schedule.stages // schedule.ranks
    memory = {"pass": "two units at a time", "run": "one stage", "step": f"all {chunks} stages of a rank"}
    memory["step"] = memory["step"] if chunks > 1 else memory["run"]
    lines = ["ZeRO stage 3 in a pipeline, all-gathers of each unit in a step, and parameters that are unsharded:"]
    for mode, held in memory.items():
        runs = [
            sum(action.op is Op.UNSHARD for action in actions) / chunks
            for actions in with_sharding(schedule, mode).actions
        ]
        count = 2 * steps if mode == "pass" else max(runs)
        chosen = " (configured)" if mode == settings.unsharded_for else ""
        lines.append(f"  unsharded_for {mode}: {count:g} x the bytes of its parameters; {held}{chosen}")
    return lines


def _text(value: Any) -> str:
    return json.dumps(value, default=str)
