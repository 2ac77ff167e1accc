"""`shardwise export`: converts a checkpoint to weights for other programs."""

from __future__ import annotations

from typing import Annotated

import typer

from shardwise.units import format_size


def register(app: typer.Typer) -> None:
    """Add the subcommand."""
    app.command("export")(export)


def export(
    checkpoint: Annotated[
        str, typer.Argument(help="A checkpoint, a directory of checkpoints, or other weights.", metavar="CKPT")
    ],
    directory: Annotated[str, typer.Argument(help="Directory for the files; created if needed.", metavar="DIR")],
    format: Annotated[
        str,
        typer.Option(
            metavar="hf|pt|dcp",
            help="hf: safetensors as Hugging Face's from_pretrained loads them; pt: a state dict as torch.save writes "
            "it; dcp: a directory of torch.distributed.checkpoint.",
        ),
    ] = "hf",
    dtype: Annotated[
        str,
        typer.Option(
            metavar="float32|bfloat16|float16|keep",
            help="Dtype of floating-point tensors. keep: the stored one (of trained parameters: master weights').",
        ),
    ] = "keep",
    max_shard_size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Size of one file, such as 5GB or 512MiB. Default: 5GB for hf, one file for pt."
        ),
    ] = None,
    exclude_frozen: Annotated[
        bool, typer.Option("--exclude-frozen", help="Leave out parameters that were not trained.")
    ] = False,
    all_names: Annotated[
        bool, typer.Option("--all-names", help="hf: write a tied tensor under each of its names, not once.")
    ] = False,
    tag: Annotated[
        str | None,
        typer.Option("--tag", "-t", help="Checkpoint of a directory of checkpoints. Default: the latest complete one."),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Copy this file to DIR/config.json, for from_pretrained."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing weights in DIR.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Compare the checkpoint with its checksums first.")
    ] = True,
) -> None:
    """Write the weights of CKPT into DIR, in one process, with little memory and without a GPU."""
    from shardwise.launch.console import Bar, must_exist

    must_exist(checkpoint)
    from shardwise.checkpoint.directory import replace_file
    from shardwise.checkpoint.exporting import export as write
    from shardwise.checkpoint.exporting import parse_export_dtype, parse_format
    from shardwise.checkpoint.formats.weight_files import shard_bytes, writing
    from shardwise.errors import CheckpointError, CommandLineError

    try:
        parse_format(format)
        parse_export_dtype(dtype)
        if max_shard_size is not None:
            shard_bytes(max_shard_size, "max-shard-size")
    except CheckpointError as error:
        raise CommandLineError(f"--{error}") from None
    text = _content(config) if config is not None else None
    with Bar("writing") as bar:
        done = write(
            checkpoint,
            directory,
            format=format,
            dtype=dtype,
            max_shard_size=max_shard_size,
            exclude_frozen=exclude_frozen,
            all_names=all_names,
            tag=tag,
            overwrite=overwrite,
            verify=verify,
            progress=bar.show,
        )
    if text is not None:
        with writing(str(directory)):
            replace_file(str(directory), "config.json", text)
    for line in done.warnings:
        typer.echo(f"warning: {line}", err=True)
    files = f", {len(done.files)} files" if len(done.files) > 1 else ""
    typer.echo(f"{directory}: {done.tensors} tensors, {format_size(done.size)}{files}")


def _content(path: str) -> bytes:
    import json

    from shardwise.errors import CommandLineError

    try:
        with open(path, "rb") as file:
            data = file.read()
        json.loads(data)
    except OSError as error:
        raise CommandLineError(f"--config {path}: {error.strerror}") from None
    except ValueError as error:
        raise CommandLineError(f"--config {path}: not JSON: {error}") from None
    return data
