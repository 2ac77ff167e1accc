"""The command `shardwise`.

Every file in `commands` adds its subcommand. Invariant: an error that shardwise raises on purpose is one
message on standard error without a traceback; exit code 2 means that the command line was wrong, 1 that
something else was.
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
    # Messages stay on one line each, for logs and scripts.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    no_args_is_help=True,
)


def _show_version(asked: bool) -> None:
    if asked:
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
    # Left alone, the list of commands cuts every summary after a few words.
    _command.short_help = (inspect.getdoc(_command.callback) or "").partition("\n\n")[0].replace("\n", " ")


def main(args: list[str] | None = None) -> None:
    """Run the command line and exit with its code.

    Args:
        args: the arguments after the program's name; None takes those of this process.
    """
    try:
        app(args, prog_name="shardwise")
    except ShardwiseError as error:
        print(f"shardwise: error: {error}", file=sys.stderr)
        sys.exit(USAGE_ERROR if isinstance(error, CommandLineError) else 1)
