"""Tables of the README and the docs from the files in bench/results.

    python bench/report.py README.md docs/*.md

A page has a table between `<!-- table NAME -->` and `<!-- /table -->`; everything else is written by hand. Figures that
have not been measured are "-". `<!-- table machine -->` names the machine of most tables of a page; the others name
theirs. Plots that a page shows are copied beside it into images/.
"""

from __future__ import annotations

import argparse
import math
import re
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from harness import RESULTS, Row, data_of, load
from pydantic import TypeAdapter

BLOCK = re.compile(r"(<!-- table (\S+) -->\n).*?(<!-- /table -->)", re.DOTALL)
NAMES = {"alone": "no communication"}


class C(NamedTuple):
    """A column of a table, see tables.toml."""

    head: str
    value: str
    where: Mapping[str, Any] = {}
    fold: Literal["first", "min", "max", "sum", "count", "join"] = "first"


@dataclass(frozen=True)
class Table:
    """A table: a row for each different value of the columns of `by`. Fields are explained in tables.toml."""

    files: Sequence[str]
    columns: Sequence[C]
    by: Sequence[str] = ("system",)
    only: Sequence[str] = ()
    keep: Sequence[Mapping[str, Any]] = ({},)
    turned: bool = False

    def lines(self, folder: Path) -> list[str]:
        """Return the lines of the table in Markdown."""
        records = [(name, record) for name in self.files if (record := load(folder, name))]
        if not records and not self.only:
            return ["Not measured yet."]
        rows = [{**row, "file": name} for name, record in records for row in record["rows"]]
        groups: dict[tuple[Any, ...], list[Row]] = {(name,): [] for name in self.only}
        for row in (row for row in rows if any(one.items() <= row.items() for one in self.keep)):
            key = tuple(row.get(name) for name in self.by)
            if not self.only or key in groups:
                groups.setdefault(key, []).append(row)
        columns = [
            c for c in self.columns if self.only or any(cell(c, own) != "-" for own in groups.values()) or not groups
        ]
        cells = [
            [cell(c, own) if own or c.value != "system" else key[0] for c in columns] for key, own in groups.items()
        ]
        failed = [f"*{row['system']}*: {row['failed']}" for own in groups.values() for row in own if "failed" in row]
        if self.turned:
            cells = [[c.head, *found] for c, found in zip(columns, zip(*cells, strict=True), strict=True)]
            return grid(["", *("" for _ in groups)], cells)
        return [*grid([c.head for c in columns], cells), *(line for text in failed for line in ("", text))]


def cell(column: C, rows: Sequence[Row]) -> str:
    """Return a cell made of the rows of a group."""
    wanted = [row for row in rows if all(row.get(key) == value for key, value in column.where.items())]
    if column.fold == "count":
        return str(len(wanted))
    if "{" in column.value:
        texts = []
        for row in wanted:
            try:
                texts.append(column.value.format(**row))
            except (KeyError, TypeError):
                continue
        if column.fold in ("min", "max") and texts:
            return (min if column.fold == "min" else max)(texts, key=float)
        return texts[0] if texts else "-"
    values = [row[column.value] for row in wanted if row.get(column.value) is not None]
    if not values:
        return "-"
    if column.fold == "join":
        return "; ".join(sorted(set(map(str, values))))
    return shown({"first": lambda v: v[0], "min": min, "max": max, "sum": sum}[column.fold](values))


def shown(value: Any) -> str:
    """Return a figure with as many digits as are worth reading.

    >>> [shown(value) for value in (0.256, 12.34, 1234.5, 12, "alone")]
    ['0.26', '12.3', '1234', '12', 'no communication']
    """
    if not isinstance(value, float):
        return NAMES.get(value, str(value))
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}" if abs(value) < 100 else f"{value:.0f}"


def grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table; the first column is text, the others are numbers."""
    lines = [f"| {' | '.join(head)} |", "|---" + "|--:" * (len(head) - 1) + "|"]
    return lines + [f"| {' | '.join(row)} |" for row in rows]


def read(file: str) -> dict[str, Table]:
    """Return the tables of a file by name."""
    found: dict[str, Any] = data_of(file)
    for name, table in found.items():
        table.setdefault("files", [name])
        if isinstance(table["columns"], str):
            table["columns"] = found[table["columns"]]["columns"]
    return TypeAdapter(dict[str, Table]).validate_python(found)


TABLES = read("tables.toml")


# -- targets of one CUDA device ----------------------------------------------------------------------------------------


class Target(NamedTuple):
    """A figure that one CUDA device should reach, see targets.toml."""

    what: str
    files: Sequence[str]
    metric: str
    system: str
    most: float = math.inf
    least: float = -math.inf
    over: str = ""
    where: Mapping[str, Any] = {}

    def cells(self, folder: Path) -> list[str]:
        """Return a row of a table: the required figure, the one that was found, and whether it is met."""
        records = [record for name in self.files if (record := load(folder, name))]
        rows = [row for record in records for row in record["rows"] if self.where.items() <= row.items()]
        value, base = (self._largest(rows, system) if system else 1.0 for system in (self.system, self.over))
        bound = f">= {self.least:g}" if self.most == math.inf else f"<= {self.most:g}"
        if value is None or base is None:
            return [self.what, bound, "-", "not measured"]
        found = value / base
        return [self.what, bound, f"{found:.3g}", "yes" if self.least <= found <= self.most else "**no**"]

    def _largest(self, rows: Sequence[Row], system: str) -> float | None:
        own = (row for row in rows if re.fullmatch(system, row["system"]))
        return max((row[self.metric] for row in own if row.get(self.metric) is not None), default=None)


TARGETS = TypeAdapter(list[Target]).validate_python(data_of("targets.toml")["targets"])


# -- pages -------------------------------------------------------------------------------------------------------------


def where(record: Row) -> str:
    """Return the machine of a record and its versions."""
    machine = record["machine"]
    versions = f"torch {machine['torch']}"
    if machine.get("deepspeed"):
        versions += f", DeepSpeed {machine['deepspeed']}"
    cores = "1 core" if machine["cores"] == 1 else f"{machine['cores']} cores"
    return f"{machine.get('gpu') or machine['processor']}, {cores}, {versions}"


def page(text: str, folder: Path) -> str:
    """Return a page with its tables."""
    names = [name for _, name, _ in BLOCK.findall(text)]
    places = {
        name: list(dict.fromkeys(where(record) for file in TABLES[name].files if (record := load(folder, file))))
        for name in names
        if name in TABLES
    }
    counts = Counter(place for own in places.values() for place in own)
    usual = max(counts, key=lambda place: (place.count(","), counts[place]), default="no machine yet")

    def block(found: re.Match[str]) -> str:
        name = found[2]
        if name == "machine":
            lines = [f"Unless a section says otherwise, measured on {usual}."]
        elif name == "gpu_targets":
            lines = grid(["", "required", "found", "met"], [target.cells(folder) for target in TARGETS])
        else:
            lines = TABLES[name].lines(folder)
            for place in places[name]:
                if not usual.startswith(place) or "machine" not in names:
                    lines += ["", f"Measured on {place}."]
        return "\n".join([found[1], *lines, "", found[3]])

    return BLOCK.sub(block, text)


def main() -> None:
    """Write the pages and copy the plots that they show; without pages print all tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--targets", action="store_true", help="print the targets of a CUDA device")
    parser.add_argument("pages", nargs="*", type=Path)
    options = parser.parse_args()
    if options.targets:
        print(*("{:66s} {:8s} found {:8s} {}".format(*one.cells(options.results)) for one in TARGETS), sep="\n")
        return
    if not options.pages:
        for name, table in TABLES.items():
            print(f"{name}:", *table.lines(options.results), "", sep="\n")
    for path in options.pages:
        text = page(path.read_text(), options.results)
        path.write_text(text)
        for name in re.findall(r"\]\([./\w]*images/(\w+\.(?:png|svg))\)", text):
            if (options.results / name).exists() and path.parent.name == "docs":
                (path.parent / "images").mkdir(exist_ok=True)
                shutil.copyfile(options.results / name, path.parent / "images" / name)


if __name__ == "__main__":
    main()
