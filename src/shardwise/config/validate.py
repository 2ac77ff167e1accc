"""Second pass over a configuration: strict types and values. A refused value with an unambiguous meaning is converted
and noted: 0 and 1 and words for booleans, numbers in quotes, null for an absent key.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from typing import Any

from pydantic import ValidationError

from .normalize import Scan, put
from .problems import Note, Path, Problem, dotted
from .schema.base import LARGEST_INT, ConfigSection
from .schema.root import Config
from .schema_index import Key, expected, keys_of, nearest


def validate(found: Scan) -> tuple[Config, list[Note], list[Problem]]:
    """Build the `Config`; return it with notes on converted values, and the problems. A wrong value falls back to its
    default, because later checks then report more.
    """
    problems: list[Problem] = []
    data: Any = found.data
    read_as: dict[Path, tuple[Any, Any]] = {}
    while True:
        try:
            config = Config.model_validate(data)
            break
        except ValidationError as error:
            for path, key in dict(_place(detail["loc"]) for detail in error.errors(include_url=False)).items():
                value = _take(data, path)
                if path in read_as:
                    value, _ = read_as.pop(path)
                elif isinstance(path[-1], str) and (meant := _meant(key, value)) is not _NOTHING:
                    read_as[path] = (value, meant)
                    if meant is not None:
                        put(data, path, meant)
                    continue
                problems.append(Problem(dotted(found.given.get(path, path)), message(key, value)))
    notes = []
    for path, (value, meant) in read_as.items():
        where = dotted(found.given.get(path, path))
        if meant is None:
            notes.append(Note(where, _place(path)[1].default, "null: as if the key were left out"))
        else:
            notes.append(Note(where, meant, f"read from {json.dumps(value)}"))
    return config, notes, problems


_NOTHING = object()
_TRUE = ("true", "t", "yes", "y", "on", "1")
_FALSE = ("false", "f", "no", "n", "off", "0")


def _meant(key: Key, value: Any) -> Any:
    """Return the converted value: None for an absent key, `_NOTHING` if the meaning is ambiguous."""
    if value is None:
        return _NOTHING if key.field.is_required() or key.kind != "value" else None
    words = expected(key)
    if "true or false" in words and not isinstance(value, bool):
        if isinstance(value, int | float) and value in (0, 1):
            return bool(value)
        if isinstance(value, str) and value.strip().lower() in (*_TRUE, *_FALSE):
            return value.strip().lower() in _TRUE
    if isinstance(value, str) and value.isascii() and key.kind == "value" and len(value) <= _LONGEST_NUMBER:
        try:
            number = float(value)
        except ValueError:
            return _NOTHING
        if math.isfinite(number):
            return int(value) if re.fullmatch(r"\s*[+-]?[0-9]+\s*", value) else number
    return _NOTHING


def _place(loc: Path) -> tuple[Path, Key]:
    """Return pydantic's location up to its last key, without alternatives of a union, and the key."""
    path: list[int | str] = []
    section: type[ConfigSection] | None = Config
    key: Key | None = None
    parts = iter(loc)
    for part in parts:
        found = keys_of(section).get(str(part)) if section is not None else None
        if found is None:
            break
        key, section = found, found.child
        path.append(part)
        if key.kind in ("list", "named"):
            path += [step for step in (next(parts, None),) if step is not None]
    assert key is not None
    return tuple(path), key


def _take(data: Any, path: Path) -> Any:
    """Remove and return the value at a path; an item of a list becomes empty, to keep the others' indices."""
    for part in path[:-1]:
        data = data[part]
    if isinstance(data, list):
        index = int(path[-1])
        value, data[index] = data[index], {}
        return value
    return data.pop(path[-1])


def message(key: Key, value: Any) -> str:
    """Return a message of expected and found value, with advice if the meaning can be guessed."""
    words = "an object {...}" if key.kind == "list" and not isinstance(value, list) else expected(key)
    text = f"expected {words}, found {show(value)}"
    advice = _advice(key, value)
    return f"{text}. {advice}" if advice else text


_LONGEST_NUMBER = 100
_SHOWN = 80


def _shortened(value: Any, depth: int = 3) -> Any:
    """Shorten a value for messages, because a huge one is slow to print."""
    if isinstance(value, str):
        return value[:_SHOWN]
    if isinstance(value, int) and value.bit_length() > 8 * _SHOWN:
        return "a huge integer"
    if isinstance(value, list | tuple):
        return [_shortened(item, depth - 1) if depth else "..." for item in value[:_SHOWN]]
    if isinstance(value, dict):
        first = itertools.islice(value.items(), _SHOWN)
        return {name: _shortened(item, depth - 1) if depth else "..." for name, item in first}
    return value


def show(value: Any) -> str:
    """Return a value as JSON with its type, shortened."""
    kinds = {bool: "true or false", int: "integer", float: "number", str: "string", list: "list", dict: "object"}
    try:
        text = json.dumps(_shortened(value))
    except (TypeError, ValueError):
        text = repr(value)
    text = text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
    if value is None or isinstance(value, bool):
        return text
    return f"{text} ({kinds.get(type(value), type(value).__name__)})"


def _advice(key: Key, value: Any) -> str:
    if isinstance(value, str):
        return _advice_on_string(key, value)
    if isinstance(value, bool) and key.child is not None and "enabled" in keys_of(key.child):
        return f'Write {{"enabled": {json.dumps(value)}}}'
    if key.child is not None and "device" in keys_of(key.child) and isinstance(value, bool):
        return f'Write {{"device": "{"cpu" if value else "none"}"}}'
    if key.name == "zero_optimization" and type(value) is int:
        return f'Write {{"stage": {value}}}'
    number = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    if number and abs(value) > LARGEST_INT:
        return f"Give at most {LARGEST_INT} (64 bits)" if _takes_integers(key) else ""
    if isinstance(value, float) and math.isfinite(value) and "an integer" in expected(key):
        return f"Write {math.floor(value)} or {math.ceil(value)}" if not value.is_integer() else ""
    if isinstance(value, int) and not isinstance(value, bool) and "true or false" in expected(key):
        return f"Write {'true' if value else 'false'}" if value in (0, 1) else ""
    return ""


def _takes_integers(key: Key) -> bool:
    return any(words in expected(key) for words in ("an integer", "bytes"))


def _advice_on_string(key: Key, value: str) -> str:
    switch = next((name for name in ("device", "type") if key.child is not None and name in keys_of(key.child)), None)
    if switch is not None:
        return f"Write {json.dumps({switch: value})}"
    words = expected(key)
    close = nearest(value, re.findall(r'"([^"]*)"', words))
    if close is not None:
        return f'Did you mean "{close}"?'
    try:
        meant = json.loads(value.strip().lower())
    except ValueError:
        return ""
    if isinstance(meant, bool | int | float):
        return f"Remove the quotes: {json.dumps(meant)}"
    return ""
