"""Entries of names.toml: every module path and public name of DeepSpeed 0.19, and what it is here."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from shardwise._version import __version__
from shardwise.errors import AbsentAttributeError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Kind = Literal["class", "exception", "function", "value"]


@dataclass(frozen=True)
class Alias:
    """A name that is served: an attribute of a module, or without `attribute` the module `home` of the drop-in."""

    home: str
    attribute: str = ""


@dataclass(frozen=True)
class Stub:
    """A name that can be imported, passed on and derived from, and raises when used. `reason` ends a sentence that
    begins with the name; `home` is the first module of the table with the name for this reason.
    """

    kind: Kind
    reason: str
    home: str = field(compare=False)


@dataclass(frozen=True)
class Missing:
    """A name that is absent: importing it is an ImportError, reading it an AttributeError."""

    reason: str


Entry = Alias | Stub | Missing
Table = dict[str, dict[str, Entry]]

_SECTIONS = ("as", "module", "stubs", "missing")


@cache
def _names() -> dict[str, Any]:
    return read("names.toml")


def read(name: str) -> dict[str, Any]:
    """Return the content of a TOML file of this package."""
    return tomllib.loads((Path(__file__).parent / name).read_text(encoding="utf-8"))


@cache
def table() -> Table:
    """Return module path -> name -> entry. A module without a served name does not exist."""
    made: Table = {}
    homes: dict[tuple[str, Kind, str], str] = {}
    for path in _names()["modules"]:
        _fill(made, homes, path)
    return made


def commands() -> dict[str, str]:
    """Return the modules for `python -m`, and the functions that they run."""
    found: dict[str, str] = _names()["commands"]
    return found


def reasons() -> Mapping[str, str]:
    """Return the reasons of absence by their keys."""
    found: dict[str, str] = _names()["reasons"]
    return found


@cache
def absent_members(cls: str) -> Mapping[str, str]:
    """Return the members that a class of DeepSpeed has and this library's class lacks, with the reasons."""
    rows = _names()["members"][cls].items()
    return {name: reason for reason, names in rows for name in names.split()}


def absent_member(cls: str, name: str, shown: str) -> AbsentAttributeError | None:
    """Return the error of reading an absent member, which messages call `shown`; None if no reason is known."""
    reason = absent_members(cls).get(name)
    if reason is None:
        return None
    return AbsentAttributeError(f"{shown}.{name} is not in shardwise {__version__}: {reason}")


def _fill(made: Table, homes: dict[tuple[str, Kind, str], str], path: str) -> dict[str, Entry]:
    if path in made:
        return made[path]
    section = _names()["modules"][path]
    entries: dict[str, Entry] = {}
    for other in section.get("as", "").split():
        entries.update(_fill(made, homes, other))
    for home, names in section.items():
        if home not in _SECTIONS:
            entries.update((name, Alias(home, there or name)) for name, there in _pairs(names, "="))
    entries.update((name, Alias(there)) for name, there in _pairs(section.get("module", ""), "="))
    for reason, names in _by_reason(path, section.get("stubs", {})):
        for name, given in _pairs(names, ":"):
            kind = _kind(name, given)
            entries[name] = Stub(kind, reason, homes.setdefault((name, kind, reason), path))
    for reason, names in _by_reason(path, section.get("missing", {})):
        entries.update((name, Missing(reason)) for name in names.split())
    made[path] = entries
    return entries


def _pairs(names: str, separator: str) -> Iterator[tuple[str, str]]:
    for declaration in names.split():
        name, _, further = declaration.partition(separator)
        yield name, further


def _by_reason(path: str, names: str | Mapping[str, str]) -> Iterable[tuple[str, str]]:
    prefixes = _names()["prefixes"]
    if not isinstance(names, str):
        return ((reasons()[key], given) for key, given in names.items())
    longest = max((prefix for prefix in prefixes if f"{path}.".startswith(f"{prefix}.")), key=len)
    return [(reasons()[prefixes[longest]], names)]


def _kind(name: str, given: str) -> Kind:
    if given in ("class", "exception", "function", "value"):
        return given  # type: ignore[return-value]
    bare = name.lstrip("_")
    if bare.isupper() and len(bare) > 1:
        return "value"
    if bare.endswith(("Error", "Exception")):
        return "exception"
    return "class" if bare[:1].isupper() else "function"
