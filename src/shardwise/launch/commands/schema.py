"""`shardwise schema`: the JSON Schema of the configuration, for editors and other tools."""

from __future__ import annotations

import json

import typer


def register(app: typer.Typer) -> None:
    """Add the subcommand."""
    app.command("schema")(schema)


def schema() -> None:
    """Print the JSON Schema of the configuration; name the saved file in a configuration under "$schema"."""
    from shardwise.config.export import json_schema

    typer.echo(json.dumps(json_schema(), indent=2))
