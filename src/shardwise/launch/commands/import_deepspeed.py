"""`shardwise import-deepspeed`: converts a DeepSpeed checkpoint."""

from __future__ import annotations

from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the subcommand."""
    app.command("import-deepspeed")(import_deepspeed)


def import_deepspeed(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="Checkpoint of DeepSpeed, or a directory of some with a file `latest`.")
    ],
    target: Annotated[str, typer.Argument(metavar="DST", help="Directory of checkpoints; created if needed.")],
    tag: Annotated[
        str | None,
        typer.Option(metavar="TAG", help="Checkpoint in SRC. Default: the one that `latest` names."),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(metavar="TAG", help="Name of the new checkpoint. Default: that of the old one."),
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(
            metavar="CLASS", help="Optimizer that will continue, such as AdamW. Default: found from the checkpoint."
        ),
    ] = None,
    no_optimizer: Annotated[bool, typer.Option("--no-optimizer", help="Leave the optimizer's state out.")] = False,
) -> None:
    """Convert the checkpoint SRC of DeepSpeed (ZeRO stages 0 to 3) to DST/<tag>, without running code from it.

    One process with memory for one tensor is enough. engine.load_checkpoint(DST) then loads it at any stage on any
    number of ranks; it also loads SRC itself.
    """
    from shardwise.errors import CommandLineError
    from shardwise.launch.console import must_exist

    if optimizer is not None and no_optimizer:
        raise CommandLineError("--optimizer and --no-optimizer contradict each other; leave one out.")
    must_exist(source)
    from shardwise.checkpoint.convert import convert, open_deepspeed

    saved = open_deepspeed(source, tag)
    with saved:
        path = convert(saved, target, name or saved.manifest.tag, optimizer=optimizer, with_optimizer=not no_optimizer)
        held = saved.manifest
        values = sum(tensor.numel for tensor in held.of_kind("parameter"))
        kind = "no optimizer state" if no_optimizer or held.optimizer is None else "optimizer state"
        typer.echo(
            f"{path}: {len(held.of_kind('parameter'))} parameters of {values} elements, {kind}, step "
            f"{held.counters['global_steps']}; saved by DeepSpeed {held.versions['deepspeed']} at stage {saved.stage} "
            f"on {held.layout['world']} ranks"
        )
        for note in saved.notes:
            typer.echo(f"not taken over: {note}")
