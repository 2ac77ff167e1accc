"""The tables of all keys, made from the schema, for the documentation; a test compares the page with the schema.
`python -m tests.config.reference docs/reference/configuration-keys.md` replaces the text between two marker lines.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from typing import Any

from shardwise.config.schema.base import ConfigSection
from shardwise.config.schema.gradients import METHODS
from shardwise.config.schema.optimizers import NATIVE_OPTIMIZERS
from shardwise.config.schema.schedules import NATIVE_SCHEDULES
from shardwise.config.schema.tables import documented
from shardwise.config.schema.tables import table as unsupported
from shardwise.config.schema_index import Key, expected, walk
from shardwise.config.unsupported import IGNORED, UNSUPPORTED
from tests.harness.pages import Page

_HEAD = "| Key | Value, default | Meaning |\n|---|---|---|"
_MODELS: dict[str, Mapping[str, type[ConfigSection]]] = {
    "optimizer": NATIVE_OPTIMIZERS,
    "scheduler": NATIVE_SCHEDULES,
    "compression": METHODS,
}
_TYPES = (
    (r" \(other usual names of these types work too\)", ""),
    (r'one of "fp32", "fp16", "bf16"', "dtype"),
    (r"one of ", ""),
    (r"true or false", "bool"),
    (r"a string that is not empty", "string"),
    (r"a string or a list of strings", "strings"),
    (r"\ban? (integer|number|string|list|object)\b", r"\1"),
    (r" and a multiple of \d+", ", even"),
    (r"\binteger(s?)\b", r"int\1"),
    (r" ([<>]=?) ", r"\1"),
    (r" and <", "<"),
)


def table() -> str:
    """Return Markdown: keys with an effect, by section; then the keys of features that this version lacks."""
    parts: list[str] = []
    for name, keys in _groups().items():
        parts.append(f"### {f'`{name}`' if name else 'Top level'}\n")
        parts.append(_HEAD)
        parts.extend(_row(path, key, len(name.split(".")) if name else 0) for path, key in keys)
        parts.append("")
        tables: dict[tuple[str, ...], list[str]] = {}
        for kind, model in _MODELS.get(name, {}).items():
            rows = tuple(_row((name, "params", *path), key, 2) for path, key in walk(model))
            tables.setdefault(rows, []).append(f'"{kind}"')
        for rows, kinds in tables.items():
            parts.extend((f"#### `{name}.params` of {', '.join(kinds)}\n", _HEAD, *rows, ""))
    parts.append("## Keys of features that this version does not have\n")
    parts.append(
        "Values after the colon, the default after the last `=`. A value that requests the feature is refused. "
        "`shardwise schema` describes each key.\n"
    )
    parts.append("```text")
    for section in unsupported()["keys"]:
        parts.extend(f"{section}.{row}" for row in documented(section))
    parts.append("```")
    return "\n".join(parts).rstrip() + "\n"


def _groups() -> dict[str, list[tuple[tuple[str, ...], Key]]]:
    groups: dict[str, list[tuple[tuple[str, ...], Key]]] = {}
    for path, key in walk():
        if key.kind != "section" and not ".".join(path).startswith(tuple(f"{name}." for name in unsupported()["keys"])):
            groups.setdefault(_group(path), []).append((path, key))
    return groups


def _group(path: tuple[str, ...]) -> str:
    return path[0] if len(path) > 1 else ""


def _names(path: tuple[str, ...], key: Key, skip: int) -> tuple[str, list[str]]:
    return ".".join(path[skip:]).replace(".[]", "[]").replace("*", "<name>"), list(key.spellings[1:])


def _row(path: tuple[str, ...], key: Key, skip: int) -> str:
    name, others = _names(path, key, skip)
    names = "".join(f"<br>`{spelling}`" for spelling in others)
    meaning = [str(key.field.description)]
    if key.replacement:
        meaning = [f"Deprecated: write `{key.replacement}`."]
    if key.no_effect:
        meaning = [f"**No effect**: {key.no_effect}."]
    note = key.extra.get("x-default-note")
    if note:
        meaning.append(f"Default: {note}.")
    if any(".".join(path).startswith(entry["path"]) for entry in IGNORED):
        meaning.append("**Warning**.")
    if any(".".join(path) == entry["path"] for entry in UNSUPPORTED):
        meaning.append("**Not built**.")
    default = "required" if key.field.is_required() else f"`{_default(key)}`"
    cells = [f"`{name}`{names}", f"{_type(key)}, {default}", " ".join(meaning)]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _type(key: Key) -> str:
    text = expected(key)
    if not key.field.is_required() and key.default is None:
        text = text.removesuffix(" or null")
    for words, short in _TYPES:
        text = re.sub(words, short, text)
    return text


def _default(key: Key) -> str:
    default: Any = key.default
    if isinstance(default, int) and not isinstance(default, bool):
        if default == sys.maxsize:
            return "2^63 - 1"
        if default >= 10**6 and str(default).strip("0") in map(str, range(1, 10)):
            return f"{default:.0e}".replace("e+0", "e")
    if isinstance(default, float):
        return f"{default:g}"
    return json.dumps(default)


PAGE = Page("configuration-keys.md", "keys", "tests.config.reference", table)

if __name__ == "__main__":
    PAGE.write()
