"""The command `shardwise`.

Each file in `commands` adds a subcommand. Invariant: an error that shardwise raises deliberately is one message on
standard error without a traceback. Exit code 2: wrong command line; 1: any other error.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
from typing import Annotated

import typer

from shardwise.errors import CommandLineError, ShardwiseError
from shardwise.launch import commands

USAGE_ERROR = 2

app = typer.Typer(
    name="shardwise",
    help="Train PyTorch models that do not fit one device.",
    # Messages are not wrapped, for logs and scripts.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    no_args_is_help=True,
)


def _show_version(requested: bool) -> None:
    if requested:
        from shardwise._version import __version__

        typer.echo(f"shardwise {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_show_version),
    ] = False,
) -> None:
    pass


for _module in pkgutil.iter_modules(commands.__path__):
    importlib.import_module(f"{commands.__name__}.{_module.name}").register(app)
_groups = [_group.typer_instance for _group in app.registered_groups]
for _command in [_one for _app in (app, *_groups) if _app is not None for _one in _app.registered_commands]:
    # By default the list of commands truncates each summary.
    _command.short_help = (inspect.getdoc(_command.callback) or "").partition("\n\n")[0].replace("\n", " ")


def main(args: list[str] | None = None) -> None:
    """Run the command line (`args`, or the arguments of this process) and exit with its code."""
    try:
        app(args, prog_name="shardwise")
    except ShardwiseError as error:
        print(f"shardwise: error: {error}", file=sys.stderr)
        sys.exit(USAGE_ERROR if isinstance(error, CommandLineError) else 1)
