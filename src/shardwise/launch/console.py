"""Tables on standard output, progress on standard error."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardwise.errors import CheckpointError, CommandLineError
from shardwise.units import parse_size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_UNWRAPPED = 10_000


def output() -> Console:
    """Return the console of standard output; files and pipes are not wrapped."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    return console if console.is_terminal else Console(highlight=False, markup=False, width=_UNWRAPPED)


def table(*columns: str, numbers: tuple[str, ...] = ()) -> Table:
    """Return an empty table; columns in `numbers` are right-aligned."""
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        made.add_column(name, justify="right" if name in numbers else "left", overflow="fold")
    return made


def print_numbers(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table of numbers, row names first; on a narrow terminal it is transposed and split to fit."""
    screen = output()
    shown = table(*head, numbers=tuple(head))
    for row in rows:
        shown.add_row(*row)
    if _width(head, rows) <= screen.width:
        screen.print(shown)
        return
    room = screen.width - max(map(len, head))
    columns = max(1, room // (2 + max(len(cell) for row in rows for cell in row)))
    for first in range(0, len(rows), columns):
        some = rows[first : first + columns]
        titles = [head[0], *(row[0] for row in some)]
        shown = table(*titles, numbers=tuple(titles[1:]))
        for place, title in enumerate(head[1:], 1):
            shown.add_row(title, *(row[place] for row in some))
        screen.print(shown)


def _width(head: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    return sum(2 + max(len(row[place]) for row in (head, *rows)) for place in range(len(head)))


def parse_speeds(written: str) -> tuple[float, float]:
    """Return the bytes/s of reading and writing of a `--disk-speed`. Raises CommandLineError."""
    try:
        read, write = (float(part) * 1e9 for part in written.split(","))
    except ValueError:
        read = write = 0.0
    if min(read, write) <= 0:
        raise CommandLineError(f"--disk-speed {written}: give two numbers above 0, GB/s of reading and of writing.")
    return read, write


def parse_bytes(text: str, name: str) -> int:
    """Return the bytes, at least 1, of the argument of option `name`. Raises CommandLineError.

    >>> parse_bytes("4G", "--size")
    4294967296
    """
    try:
        found = parse_size(text)
    except ValueError as error:
        raise CommandLineError(f"{name} {text}: {error}.") from error
    if found < 1:
        raise CommandLineError(f"{name} {text}: expected at least 1 byte.")
    return found


def must_exist(path: str) -> None:
    """Raise a CheckpointError if a path does not exist, before torch is imported to read it."""
    if not os.path.lexists(path):
        raise CheckpointError(f"{path}: there is no such file or directory")


class Bar:
    """Progress bar on standard error, if it is a terminal; `what` is its label."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._progress: Any = None
        self._task: Any = None

    def __enter__(self) -> Bar:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress

            self._progress = Progress(console=Console(stderr=True), transient=True)
            self._progress.start()
            self._task = self._progress.add_task(self._what, total=None)
        return self

    def show(self, done: int, total: int) -> None:
        """Update the progress."""
        if self._progress is not None:
            self._progress.update(self._task, completed=done, total=total)

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()
