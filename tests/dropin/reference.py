"""The tables of docs/reference/deepspeed-names.md, made from those of the drop-in; a test compares both.

`python -m tests.dropin.reference docs/reference/deepspeed-names.md` replaces the text between two marker lines.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shardwise_deepspeed.entries import Alias, Entry, Missing, Stub, absent_members, table
from tests.dropin.inventory import MEMBERS
from tests.harness.pages import Page

TABLE = table()


def counts(table: Mapping[str, Mapping[str, Entry]]) -> tuple[int, int, int]:
    """Return the numbers of served names, stubs, and absent names."""
    entries = [entry for entries in table.values() for entry in entries.values()]
    served, stubs = (sum(isinstance(entry, kind) for entry in entries) for kind in (Alias, Stub))
    return served, stubs, len(entries) - served - stubs


def page() -> str:
    """Return Markdown: counts, the entries of each module, then those of members of classes."""
    served, stubs, missing = counts(TABLE)
    absent = {path: _absent(path) for path in MEMBERS}
    inside, outside = (sum(map(len, found.values())) for found in (MEMBERS, absent))
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
    parts.append("\n## Names that cannot be imported\n\n| Reason | Names |\n|---|---|")
    parts.extend(_by_reason(TABLE, Missing))
    parts.append("\n## Members of classes\n")
    for path, entries in MEMBERS.items():
        title = f"`{path}`" if "." in path else "A resharded parameter of ZeRO stage 3"
        parts.append(f"### {title}\n\n{len(entries)} served, {len(absent[path])} absent.\n")
        parts.append(", ".join(f"`{name}`" for name in sorted(entries)) + "\n")
        if absent[path]:
            parts.append("| Reason | Absent |\n|---|---|")
            rows = {name: Missing(reason) for name, reason in absent[path].items()}
            parts.extend([*_by_reason({"": rows}, Missing), ""])
    return "\n".join(parts).rstrip() + "\n"


def _by_home(entries: Mapping[str, Alias]) -> Iterable[str]:
    found: dict[str, list[str]] = {}
    for name, entry in entries.items():
        there = f" is `{entry.attribute}`" if entry.attribute not in ("", name) else ""
        found.setdefault(entry.home, []).append(f"`{name}`{there}")
    return (f"- `{home}`: {', '.join(names)}" for home, names in found.items())


def _absent(path: str) -> Mapping[str, str]:
    try:
        return absent_members(path)
    except KeyError:
        return {}


def _numbers(table: Mapping[str, Mapping[str, Entry]]) -> str:
    return " / ".join(map(str, counts(table)))


def _by_reason(table: Mapping[str, Mapping[str, Entry]], kind: type[Stub] | type[Missing]) -> Iterable[str]:
    found: dict[str, list[str]] = {}
    for path, entries in sorted(table.items()):
        for name, entry in sorted(entries.items()):
            if isinstance(entry, (Stub, Missing)) and isinstance(entry, kind):
                whole = path if name == "*" else f"{path}.{name}".lstrip(".")
                found.setdefault(entry.reason, []).append(f"`{whole}`")
    return (f"| {reason} | {', '.join(names)} |" for reason, names in found.items())


PAGE = Page("deepspeed-names.md", "names", "tests.dropin.reference", page)

if __name__ == "__main__":
    PAGE.write()
