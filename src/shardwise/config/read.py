"""Reading a configuration from a dictionary, a file, JSON text, or base64, as a copy."""

from __future__ import annotations

import base64
import binascii
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from shardwise.errors import ConfigError

from .jsonc import DEEPEST, JSONSyntaxError, Members, parse
from .problems import Note, Path, Problem, dotted, raise_problems

_OBJECT = re.compile(r"\ufeff?(\s|//[^\n]*\n|#[^\n]*\n|/\*([^*]|\*(?!/))*\*/)*\{")
"""Beginning of a JSON object, comments included."""
_MOST_BITS = 1023
"""Maximum bits of an integer that can be converted to a float."""


@dataclass(frozen=True)
class Document:
    """A configuration (`data`) as written, with its origin for messages, such as `ds_config.json` or `the config dict`.

    Attributes:
        extensions: text on used extensions of standard JSON, or None.
        written: the JSON object before keys without effect were removed; None: none was removed.
        ignored: keys that were removed or read as another value, with the reason.
    """

    data: dict[str, Any]
    origin: str
    extensions: str | None = None
    written: dict[str, Any] | None = None
    ignored: tuple[Note, ...] = ()


def load(source: Any) -> dict[str, Any]:
    """Read a configuration and return it as a new dictionary, exactly as written.

    Args:
        source: a dictionary; the path of a JSON file (`str` or `os.PathLike`); JSON text; or JSON text encoded
            in URL-safe base64. Files and text may have comments and trailing commas.

    Raises:
        ConfigError: the file is missing or not a file, the text is not JSON (with line and column), a key is given
            twice, a dictionary contains itself, or a number is beyond the range of floating-point numbers.

    >>> load('{"train_batch_size": 8, /* samples */}')
    {'train_batch_size': 8}
    """
    return read(source).data


def merged(values: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with the values of another one in the place of its own, section by section.

    >>> merged({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}})
    {'a': {'b': 3, 'c': 2}}
    """
    found = dict(values)
    for name, value in over.items():
        before = found.get(name)
        both = isinstance(before, dict) and isinstance(value, dict)
        found[name] = merged(before, value) if both else value  # type: ignore[arg-type]
    return found


def read(source: Any) -> Document:
    """Read a configuration as `load` does; return it with its origin."""
    if isinstance(source, Document):
        return source
    if isinstance(source, dict):
        origin = "the config dict"
        return Document(_checked(source, origin), origin)
    if isinstance(source, os.PathLike) and isinstance(name := os.fspath(source), str):
        return _from_file(FilePath(name))
    if isinstance(source, str):
        return _from_string(source)
    raise ConfigError(
        f"a configuration is a dict, the path of a JSON file, or base64-encoded JSON; found {type(source).__name__}"
    )


def _checked(value: Any, origin: str) -> Any:
    problems: list[Problem] = []
    copied = _copy(value, (), (), problems)
    raise_problems(problems, origin)
    return copied


def _copy(value: Any, path: Path, around: tuple[int, ...], problems: list[Problem]) -> Any:
    """Copy containers and keep leaves, which may not be copyable; `around` has the ids of enclosing containers."""
    if isinstance(value, dict | list):
        if id(value) in around:
            problems.append(Problem(dotted(path), "this contains itself"))
            return None
        if len(path) > DEEPEST:
            problems.append(Problem(dotted(path[:3]), f"nested more than {DEEPEST} deep"))
            return None
        around = (*around, id(value))
    if isinstance(value, dict):
        for name in value.twice if isinstance(value, Members) else ():
            problems.append(Problem(dotted((*path, name)), "this key is given twice; keep one of them"))
        # A dictionary may have any keys; keys that are not strings are reported later.
        return {name: _copy(item, (*path, str(name)), around, problems) for name, item in value.items()}
    if isinstance(value, list):
        return [_copy(item, (*path, index), around, problems) for index, item in enumerate(value)]
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        problems.append(Problem(dotted(path), "this integer is beyond the range of floating-point numbers"))
        return None
    return value


def _from_string(source: str) -> Document:
    if _OBJECT.match(source):
        return _from_text(source, "the JSON text")
    if _is_file(source):
        return _from_file(FilePath(source))
    decoded = _decode_base64(source)
    if decoded is not None:
        return _from_text(decoded, "the base64-encoded configuration")
    shown = source if len(source) <= 200 else source[:200] + "..."
    raise ConfigError(
        f"there is no file {shown!r} (looked in {os.getcwd()}), and the string is neither JSON nor base64-encoded JSON"
    )


def _is_file(name: str) -> bool:
    try:
        return bool(name) and FilePath(name).exists()
    except (OSError, ValueError):
        return False


def _decode_base64(text: str) -> str | None:
    compact = "".join(text.split()).replace("+", "-").replace("/", "_")
    compact += "=" * (-len(compact) % 4)
    try:
        decoded = base64.b64decode(compact, altchars=b"-_", validate=True).decode("utf-8")
    except (binascii.Error, ValueError):
        return None
    return decoded if _OBJECT.match(decoded) else None


def _from_file(path: FilePath) -> Document:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode) and not path.is_dir():
            # A pipe may never end, or never begin.
            raise ConfigError(f"{path} is not a file with a configuration, but a pipe or a device")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"there is no file {str(path)!r} (looked in {os.getcwd()})") from None
    except UnicodeDecodeError as problem:
        raise ConfigError(f"{path} is not a text file in UTF-8 (byte {problem.start})") from None
    except OSError as problem:
        raise ConfigError(f"cannot read {path}: {problem.strerror}") from None
    return _from_text(text, str(path))


def _from_text(text: str, origin: str) -> Document:
    try:
        value, used = parse(text)
    except JSONSyntaxError as problem:
        raise ConfigError(f"{origin} is not JSON: {problem}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{origin} must hold a JSON object {{...}}, found {type(value).__name__}")
    extensions = ", ".join(f"{what} (line {line})" for what, line in used.items())
    return Document(_checked(value, origin), origin, extensions or None)
