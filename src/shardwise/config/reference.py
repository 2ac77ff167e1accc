"""The table of all keys, made from the schema, for the documentation.

`python -m shardwise.config.reference docs/configuration.md` replaces what stands between the two marker lines of the
file. A test compares the file with the schema, so the table cannot go stale.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from .built import UNBUILT, UNHEARD
from .schema.gradients import METHODS
from .tree import Key, expected, walk

BEGIN = "<!-- keys: made by python -m shardwise.config.reference -->"
END = "<!-- end of keys -->"
_HEAD = "| Key | Values | Default | Meaning |\n|---|---|---|---|"


def table() -> str:
    """Return Markdown: a heading and a table per section, in the order of the schema."""
    groups: dict[str, list[tuple[tuple[str, ...], Key]]] = {}
    for path, key in walk():
        if key.kind == "section":
            continue
        groups.setdefault(_group(path), []).append((path, key))
    parts: list[str] = []
    for name, keys in groups.items():
        parts.append(f"### {f'`{name}`' if name else 'Top level'}\n")
        parts.append(_HEAD)
        parts.extend(_row(path, key, len(name.split(".")) if name else 0) for path, key in keys)
        parts.append("")
        if name == "compression":
            for method, section in METHODS.items():
                parts.append(f'#### `compression.params` of "{method}"\n')
                parts.append(_HEAD)
                rows = [(("compression", "params", *path), key) for path, key in walk(section)]
                parts.extend(_row(path, key, 2) for path, key in rows)
                parts.append("")
    return "\n".join(parts).rstrip() + "\n"


def _group(path: tuple[str, ...]) -> str:
    return path[0] if len(path) > 1 else ""


def _row(path: tuple[str, ...], key: Key, skip: int) -> str:
    name = ".".join(path[skip:]).replace(".[]", "[]").replace("*", "<name>")
    names = "".join(f"<br>also `{spelling}`" for spelling in key.spellings[1:])
    meaning = [str(key.field.description)]
    if key.replacement:
        meaning.append(f"Deprecated: moved to `{key.replacement}`.")
    if key.no_effect:
        meaning.append(f"*Accepted, no effect*: {key.no_effect}.")
    note = key.extra.get("x-default-note")
    if note:
        meaning.append(f"Default: {note}.")
    if _unbuilt(path):
        meaning.append("*Not in this version.*")
    elif any(".".join(path).startswith(entry.path) for entry in UNHEARD):
        meaning.append("*Accepted with a warning, does nothing yet.*")
    cells = [f"`{name}`{names}", expected(key), f"`{_default(key)}`", " ".join(meaning)]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(key: Key) -> str:
    default: Any = key.default
    if isinstance(default, int) and not isinstance(default, bool) and default == sys.maxsize:
        return "2^63 - 1"
    if isinstance(default, float):
        return f"{default:g}"
    return json.dumps(default)


def _unbuilt(path: tuple[str, ...]) -> bool:
    """Whether the key, or the switch of its section, asks for something that this version does not have."""
    dots = ".".join(path)
    sections = [entry.path.removesuffix(".enabled").removesuffix(".deepcompile") for entry in UNBUILT]
    return any(dots == entry.path for entry in UNBUILT) or any(dots.startswith(f"{name}.") for name in sections)


def update(text: str) -> str:
    """Return a page with the table between the markers replaced.

    Raises:
        ValueError: the page does not have both markers in this order.
    """
    return fill(text, table(), BEGIN, END)


def fill(text: str, content: str, begin: str, end: str) -> str:
    """Return a page with what is between two markers replaced.

    Raises:
        ValueError: the page does not have both markers in this order.
    """
    before, first, rest = text.partition(begin)
    _, second, after = rest.partition(end)
    if not first or not second:
        raise ValueError(f"the page needs a line {begin!r} and after it a line {end!r}")
    return f"{before}{begin}\n\n{content}\n{end}{after}"


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(update(page.read_text(encoding="utf-8")), encoding="utf-8")
