"""Memory table: planned, measured and minimum bytes, by category."""

from __future__ import annotations

import io
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from shardwise.memory.accountant import Category
from shardwise.units import format_size


@dataclass(frozen=True)
class MemoryRow:
    """One line of the table (a category, or `total`), in bytes of one rank. None: unknown (see the report's notes).

    Attributes:
        planned: result of a dry run of a step.
        measured: peak bytes since the last reset. Peaks need not coincide: the total may be less than the sum.
        floor: minimum of the sharding plan's arithmetic.
        live: bytes at the time of the report; in OOM reports.
    """

    name: str
    planned: int | None
    measured: int | None
    floor: int | None
    live: int | None = None


@dataclass(frozen=True)
class MemoryReport:
    """Memory of one rank by category.

    Attributes:
        rows: one per category, in the order of `Category`.
        parameters: elements of the whole model's parameters, the divisor of bytes per parameter.
        construction: peak bytes during the engine's construction.
        resident: current resident set size of the process, None if unknown.
        process: part of `resident` before the construction, without the model: interpreter, libraries, data.
        notes: reasons for unknown values.
        allocated, reserved: peak bytes of torch's CUDA allocator since its last reset; None on other devices.
        elsewhere: one line for each other tier in use.
        moved: planned bytes of a step that are read from ("read") and written to ("written") each of these tiers.
    """

    rows: tuple[MemoryRow, ...]
    total: MemoryRow
    parameters: int
    rank: int
    world: int
    construction: int
    resident: int | None = None
    process: int | None = None
    notes: tuple[str, ...] = ()
    allocated: int | None = None
    reserved: int | None = None
    elsewhere: tuple[MemoryRow, ...] = ()
    moved: dict[str, dict[str, int]] = field(default_factory=dict)

    def row(self, category: Category) -> MemoryRow:
        """Return the line of a category."""
        return next(row for row in self.rows if row.name == category.value)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain JSON values."""
        return asdict(self)

    def render(self, width: int = 100) -> str:
        """Return the table as text."""
        return as_text([self], width)

    def print(self) -> None:
        """Print the table to standard output, on rank 0 only."""
        if self.rank == 0:
            from rich.console import Console

            Console().print(self)

    def __rich__(self) -> Any:
        title = f"Memory of rank {self.rank} of {self.world} ({self.parameters:,} parameters in the whole model)"
        ratios = ("planned B/param", "measured B/param")
        live = [] if self.total.live is None else ["held now"]
        table = plain_table(title, ("", "planned", "measured", "floor", *live, *ratios), self._captions(), wraps=ratios)
        for row in self.rows:
            table.add_row(*self._cells(row))
        table.add_section()
        table.add_row(*self._cells(self.total), style="bold")
        for row in self.elsewhere:
            table.add_row(*self._cells(replace(row, name=f"on {row.name}")))
        return table

    def _cells(self, row: MemoryRow) -> list[str]:
        sizes = [format_size(row.planned), format_size(row.measured), format_size(row.floor)]
        if self.total.live is not None:
            sizes.append(format_size(row.live))
        ratios = [
            "-" if value is None or not self.parameters else f"{value / self.parameters:.2f}"
            for value in (row.planned, row.measured)
        ]
        return [row.name, *sizes, *ratios]

    def _captions(self) -> list[str]:
        lines = [
            "planned: found by a dry run. measured: the most held at once. floor: what the stage cannot do without.",
            "Lines peak at different moments, so that a total may be less than their sum.",
            f"While the engine was built: at most {format_size(self.construction)}.",
        ]
        lines += [
            f"A step reads {format_size(sizes['read'])} from the {tier} and writes {format_size(sizes['written'])} "
            "there."
            for tier, sizes in self.moved.items()
        ]
        if self.allocated is not None:
            sizes = f"{format_size(self.allocated)} allocated, {format_size(self.reserved)} reserved"
            lines.append(f"The device's allocator: at most {sizes}.")
        if self.resident is not None:
            line = f"Resident set size: {format_size(self.resident)}"
            if self.process is not None:
                line += f", of which {format_size(self.process)} before the engine and without the model"
            lines.append(line + ".")
        return [*lines, *self.notes]


def plain_table(
    title: str, columns: Iterable[str], caption: Iterable[str] = (), *, left: Collection[str] = ("",), wraps: Any = ()
) -> Any:
    """Return a rich table without frames, because log files have 80 columns; columns not in `left` are numbers."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, box=box.SIMPLE, collapse_padding=True)
    table.caption, table.caption_justify = Text("\n".join(caption)), "left"
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=name not in wraps)
    return table


def as_text(printed: Iterable[Any], width: int) -> str:
    """Return rich's output for objects as plain text of `width` columns."""
    from rich.console import Console

    text = io.StringIO()
    console = Console(file=text, width=width)
    for item in printed:
        console.print(item)
    return text.getvalue()
