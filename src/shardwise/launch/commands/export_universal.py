"""`shardwise export-universal`: writes a checkpoint in DeepSpeed's universal format."""

from __future__ import annotations

from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the subcommand."""
    app.command("export-universal")(export_universal)


def export_universal(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CKPT", help="A checkpoint of shardwise or DeepSpeed, or a directory of some.")
    ],
    target: Annotated[str, typer.Argument(metavar="DST", help="Directory of checkpoints; created if needed.")],
    tag: Annotated[
        str | None,
        typer.Option("--tag", "-t", help="Checkpoint in CKPT. Default: the latest complete one."),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(metavar="TAG", help="Name of the new checkpoint. Default: that of the old one."),
    ] = None,
    stages: Annotated[
        bool, typer.Option("--stages", help="For DeepSpeed's PipelineModule; CKPT is that of a PipelineModule.")
    ] = False,
    tied: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=LAYER", help="With --stages: the first layer of a TiedLayerSpec's key. Repeatable."),
    ] = None,
) -> None:
    """Write the checkpoint CKPT to DST/<tag> in DeepSpeed's universal format, with DST/latest_universal.

    One process with little memory is enough. DeepSpeed loads it with checkpoint.load_universal.
    """
    from shardwise.launch.console import Bar, must_exist

    must_exist(checkpoint)
    keys = _keys(tied or [])
    from shardwise.checkpoint.formats.universal_writer import write_universal
    from shardwise.checkpoint.opening import open_source
    from shardwise.checkpoint.reader import Checkpoint
    from shardwise.errors import CommandLineError

    with open_source(checkpoint, tag) as source:
        if not isinstance(source, Checkpoint):
            raise CommandLineError(f"{checkpoint}: {source.what} has no optimizer state; a checkpoint is needed")
        with Bar("writing") as bar:
            new = name or source.manifest.tag
            notes = write_universal(source, target, new, stages=stages, tied=keys, progress=bar.show)
        held = source.manifest
        typer.echo(f"{target}/{new}: {len(held.of_kind('parameter'))} parameters, step {held.counters['global_steps']}")
        for note in notes:
            typer.echo(f"not written: {note}")


def _keys(given: list[str]) -> dict[str, int]:
    from shardwise.errors import CommandLineError

    found = {}
    for text in given:
        key, _, layer = text.partition("=")
        if not key or not layer.isdecimal():
            raise CommandLineError(f"--tied {text}: expected KEY=LAYER, such as embed=0")
        found[key] = int(layer)
    return found
