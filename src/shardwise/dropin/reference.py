"""The tables of docs/compatibility.md, made from those of the drop-in.

`python -m shardwise.dropin.reference docs/compatibility.md` replaces what stands between the two marker lines of the
file. A test compares the file with the tables, so that it cannot go stale.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from shardwise.config.reference import fill
from shardwise.dropin.entries import Absent, Entry, Served
from shardwise.dropin.members import MEMBERS
from shardwise.dropin.table import TABLE

BEGIN = "<!-- names: made by python -m shardwise.dropin.reference -->"
END = "<!-- end of names -->"


def counts(table: Mapping[str, Mapping[str, Entry]]) -> tuple[int, int]:
    """Return (names that are served, names that are absent)."""
    entries = [entry for entries in table.values() for entry in entries.values()]
    served = sum(isinstance(entry, Served) for entry in entries)
    return served, len(entries) - served


def page() -> str:
    """Return Markdown: counts, what is served and what is absent by module, then the same of classes."""
    served, absent = counts(TABLE)
    inside, outside = counts(MEMBERS)
    parts = [
        f"{len(TABLE)} modules with {served + absent} names: {served} served, {absent} absent. {len(MEMBERS)} classes "
        f"with {inside + outside} members: {inside} served, {outside} absent.\n",
        "### Modules\n",
        "| Module | Served | Absent |\n|---|---:|---:|",
    ]
    parts.extend(f"| `{path}` | {_numbers({path: entries})} |" for path, entries in sorted(TABLE.items()))
    parts.append("\n### Served names\n")
    for path, entries in sorted(TABLE.items()):
        rows = [f"| {_name(name, entry)} | {_target(entry)} |" for name, entry in sorted(entries.items()) if _is(entry)]
        if rows:
            parts.append(f"#### `{path}`\n\n| Name | Here |\n|---|---|")
            parts.extend([*rows, ""])
    parts.append("### Absent names\n\n| Reason | Names |\n|---|---|")
    parts.extend(_by_reason(TABLE))
    parts.append("\n### Members of classes\n")
    for path, entries in MEMBERS.items():
        inside, outside = counts({path: entries})
        title = f"`{path}`" if "." in path else path
        parts.append(f"#### {title[0].upper()}{title[1:]}\n\n{inside} served, {outside} absent.\n")
        parts.append(", ".join(_name(name, entry) for name, entry in sorted(entries.items()) if _is(entry)) + "\n")
        if outside:
            parts.append("| Reason | Absent |\n|---|---|")
            parts.extend([*_by_reason({"": entries}), ""])
    return "\n".join(parts).rstrip() + "\n"


def _is(entry: Entry) -> bool:
    return isinstance(entry, Served)


def _numbers(table: Mapping[str, Mapping[str, Entry]]) -> str:
    served, absent = counts(table)
    return f"{served} | {absent}"


def _name(name: str, entry: Entry) -> str:
    signature = entry.signature if isinstance(entry, Served) else None
    return f"`{name}{signature or ''}`".replace("|", "\\|")


def _target(entry: Entry) -> str:
    assert isinstance(entry, Served)
    return f"`{entry.target.replace(':', '.')}`"


def _by_reason(table: Mapping[str, Mapping[str, Entry]]) -> Iterable[str]:
    """Give rows of reasons, each with its names."""
    found: dict[str, list[str]] = {}
    for path, entries in sorted(table.items()):
        for name, entry in sorted(entries.items()):
            if isinstance(entry, Absent):
                whole = path if name == "*" else f"{path}.{name}".lstrip(".")
                found.setdefault(entry.reason, []).append(f"`{whole}`")
    return (f"| {reason} | {', '.join(names)} |" for reason, names in found.items())


def update(text: str) -> str:
    """Return a page with what is between the markers replaced.

    Raises:
        ValueError: the page does not have both markers in this order.
    """
    return fill(text, page(), BEGIN, END)


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(update(file.read_text(encoding="utf-8")), encoding="utf-8")
