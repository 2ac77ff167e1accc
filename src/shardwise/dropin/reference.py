"""The tables of docs/reference/deepspeed-names.md, made from those of the drop-in; a test compares both.

`python -m shardwise.dropin.reference docs/reference/deepspeed-names.md` replaces the text between two marker lines.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from shardwise.config.reference import fill
from shardwise.dropin.entries import Alias, Entry, Missing, Stub
from shardwise.dropin.members import MEMBERS
from shardwise.dropin.table import TABLE

BEGIN = "<!-- names: made by python -m shardwise.dropin.reference -->"
END = "<!-- end of names -->"


def counts(table: Mapping[str, Mapping[str, Entry]]) -> tuple[int, int, int]:
    """Return the numbers of served names, stubs, and absent names."""
    entries = [entry for entries in table.values() for entry in entries.values()]
    served, stubs = (sum(isinstance(entry, kind) for entry in entries) for kind in (Alias, Stub))
    return served, stubs, len(entries) - served - stubs


def page() -> str:
    """Return Markdown: counts, the entries of each module, then those of members of classes."""
    served, stubs, missing = counts(TABLE)
    inside, _, outside = counts(MEMBERS)
    parts = [
        f"{len(TABLE)} modules with {served + stubs + missing} names: {served} are served, {stubs} can be imported "
        f"and raise when they are used, {missing} cannot be imported. {len(MEMBERS)} classes with {inside + outside} "
        f"members: {inside} are served, {outside} are absent.\n",
        "## Served names\n",
        "Below each module the numbers of names that are served, that raise when used, and that cannot be imported; "
        "before each colon where the names live. Functions and classes take the arguments of DeepSpeed.\n",
    ]
    first: dict[str, str] = {}
    for path, entries in sorted(TABLE.items()):
        found = {name: entry for name, entry in sorted(entries.items()) if isinstance(entry, Alias)}
        if not found:
            continue
        same = first.setdefault(repr(found), path)
        parts.append(f"### `{path}`\n\n{_numbers({path: entries})}\n")
        parts.append(f"As `{same}`.\n" if same != path else "\n".join(_by_home(found)) + "\n")
    parts.append("## Names that raise when they are used\n\n| Reason | Names |\n|---|---|")
    parts.extend(_by_reason(TABLE, Stub))
    parts.append("\n## Names that cannot be imported\n\n| Reason | Why not a name that raises | Names |\n|---|---|---|")
    parts.extend(_by_reason(TABLE, Missing))
    parts.append("\n## Members of classes\n")
    for path, entries in MEMBERS.items():
        inside, _, outside = counts({path: entries})
        title = f"`{path}`" if "." in path else path
        parts.append(f"### {title[0].upper()}{title[1:]}\n\n{inside} served, {outside} absent.\n")
        parts.append(", ".join(f"`{name}`" for name, entry in sorted(entries.items()) if _is(entry)) + "\n")
        if outside:
            parts.append("| Reason | Absent |\n|---|---|")
            parts.extend([*_by_reason({"": entries}, Missing), ""])
    return "\n".join(parts).rstrip() + "\n"


def _by_home(entries: Mapping[str, Alias]) -> Iterable[str]:
    found: dict[str, list[str]] = {}
    for name, entry in entries.items():
        home, _, there = entry.target.partition(":")
        found.setdefault(home, []).append(f"`{name}`" + (f" is `{there}`" if there not in ("", name) else ""))
    return (f"- `{home}`: {', '.join(names)}" for home, names in found.items())


def _is(entry: Entry) -> bool:
    return isinstance(entry, Alias)


def _numbers(table: Mapping[str, Mapping[str, Entry]]) -> str:
    return " / ".join(map(str, counts(table)))


def _by_reason(table: Mapping[str, Mapping[str, Entry]], kind: type[Stub] | type[Missing]) -> Iterable[str]:
    found: dict[str, list[str]] = {}
    for path, entries in sorted(table.items()):
        for name, entry in sorted(entries.items()):
            if isinstance(entry, (Stub, Missing)) and isinstance(entry, kind):
                probed_by = entry.probed_by if isinstance(entry, Missing) else ""
                whole = path if name == "*" else f"{path}.{name}".lstrip(".")
                found.setdefault(f"{entry.reason} | {probed_by}" if probed_by else entry.reason, []).append(
                    f"`{whole}`"
                )
    return (f"| {reason} | {', '.join(names)} |" for reason, names in found.items())


def update(text: str) -> str:
    """Return a page with new text between the markers. Raises ValueError without both markers in this order."""
    return fill(text, page(), BEGIN, END)


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(update(file.read_text(encoding="utf-8")), encoding="utf-8")
