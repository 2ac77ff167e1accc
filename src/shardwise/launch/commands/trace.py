"""`shardwise trace`: merges the timelines of all ranks, and sums up each rank's time."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the subcommand."""
    app.command("trace")(trace)


def trace(
    directory: Annotated[
        str, typer.Argument(help="Directory of timeline-*.json files (`timeline.path`).", metavar="DIR")
    ],
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="FILE", help="Trace to write; default: DIR/merged.json."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as one JSON object.")] = False,
) -> None:
    """Merge the timelines of all ranks to one trace, and print each rank's time by category.

    The trace opens in ui.perfetto.dev and chrome://tracing.
    """
    from pathlib import Path

    from shardwise.errors import TimelineError
    from shardwise.launch.console import print_numbers
    from shardwise.profile.trace import read, rows, summarize, write_merged

    timelines = read(directory)
    file = Path(directory, "merged.json") if output is None else Path(output)
    try:
        write_merged(timelines, file)
    except OSError as error:
        raise TimelineError(f"{file} cannot be written: {error.strerror or error}") from error
    summary = summarize(timelines)
    if as_json:
        typer.echo(json.dumps({"file": str(file), **summary.as_dict()}, indent=2))
        return
    head, *cells = rows(summary)
    print_numbers(head, cells)
    unknown = 1e3 * summary.stragglers.uncertainty
    typer.echo(
        "hidden: while gathers and reductions were under way, the rank did not wait for them; caused: others waited for"
        f" it. {summary.stragglers.collectives} collectives compared; clocks are known to {unknown:.3f} ms."
    )
    for times in summary.ranks:
        if times.moved:
            typer.echo(
                f"rank {times.rank}: state moved for {times.moved:.3f} s, {times.moves_hidden:.3f} s of it hidden"
            )
    for timeline in timelines:
        if timeline.about.get("left_out"):
            typer.echo(f"rank {timeline.rank}: {timeline.about['left_out']} ranges and collectives are left out")
    missing = sorted(set(range(max(int(t.about.get("world", 0)) for t in timelines))) - {t.rank for t in timelines})
    if missing:
        typer.echo(f"there are no timelines of ranks {', '.join(map(str, missing))}")
    typer.echo(f"{file}: open it in ui.perfetto.dev or chrome://tracing")
