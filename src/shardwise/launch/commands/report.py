"""`shardwise report`: renders the report of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the subcommand."""
    app.command("report")(report)


def report(
    directory: Annotated[str, typer.Argument(help="Directory of the run (run_log.path).", metavar="RUN_DIR")],
    out: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="FILE", help="File to write. Default: RUN_DIR/report.html."),
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
) -> None:
    """Draw a run as one HTML page: loss, speed, memory against plan, communication, slow ranks, warnings.

    The page is self-contained and fetches nothing. The run may still be going on.
    """
    from shardwise.report import write_report

    path = write_report(Path(directory), None if out is None else Path(out))
    typer.echo(path)
    if show:
        import webbrowser

        webbrowser.open(path.resolve().as_uri())
