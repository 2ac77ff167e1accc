"""The words of the table: what a name of DeepSpeed's is here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["class", "function", "value", "module", "member"]


@dataclass(frozen=True)
class Served:
    """A name that is there.

    Attributes:
        kind: what it is.
        target: `package.module:attribute` of shardwise; for a module, the drop-in module of which it is another name;
            for a member, nothing: it is looked up in its class.
        signature: arguments that scripts may rely on, as in a `def`; "..." for a default stands for any. None: not
            declared. What the target takes beyond them is its own.
    """

    kind: Kind
    target: str
    signature: str | None = None


@dataclass(frozen=True)
class Absent:
    """A name that is not there.

    Attributes:
        reason: why; the end of a sentence that begins with the name.
    """

    reason: str


Entry = Served | Absent
Entries = Mapping[str, Entry]

_DECLARATION = re.compile(r"(?P<name>\w+)(?P<signature>\(.*\))?(?:\s*=\s*(?P<target>[\w.]+))?", re.DOTALL)


def _served(kind: Kind, home: str, declarations: Iterable[str]) -> dict[str, Entry]:
    made: dict[str, Entry] = {}
    for declaration in declarations:
        match = _DECLARATION.fullmatch(declaration)
        if match is None:
            raise ValueError(f"not `name`, `name(arguments)` or either followed by `= other_name`: {declaration!r}")
        made[match["name"]] = Served(kind, f"{home}:{match['target'] or match['name']}", match["signature"])
    return made


def functions(home: str, *declarations: str) -> dict[str, Entry]:
    """Functions of the module `home`: `name(arguments)`, and ` = name there` where that differs."""
    return _served("function", home, declarations)


def classes(home: str, *declarations: str) -> dict[str, Entry]:
    """Classes of the module `home`, with the arguments of their constructors."""
    return _served("class", home, declarations)


def values(home: str, *declarations: str) -> dict[str, Entry]:
    """Objects of the module `home` that are neither functions nor classes."""
    return _served("value", home, declarations)


def modules(*declarations: str) -> dict[str, Entry]:
    """Other names of modules of the drop-in: `name = deepspeed.its.path`."""
    made: dict[str, Entry] = {}
    for declaration in declarations:
        name, _, target = declaration.partition(" = ")
        made[name] = Served("module", target)
    return made


def absent(reason: str, names: str) -> dict[str, Entry]:
    """Names, separated by spaces, that are not there."""
    return dict.fromkeys(names.split(), Absent(reason))


def joined(*parts: Entries) -> dict[str, Entry]:
    """Put the rows of one module together.

    Raises:
        ValueError: a name occurs twice.
    """
    made: dict[str, Entry] = {}
    for part in parts:
        twice = made.keys() & part.keys()
        if twice:
            raise ValueError(f"in the table twice: {', '.join(sorted(twice))}")
        made.update(part)
    return made


def members(*declarations: str) -> dict[str, Entry]:
    """Members of a class, several in one string; one with arguments comes last in its string."""
    made: dict[str, Entry] = {}
    for declaration in declarations:
        plain, opened, arguments = declaration.partition("(")
        *others, last = plain.split()
        made.update({name: Served("member", "") for name in others})
        made[last] = Served("member", "", f"({arguments}" if opened else None)
    return made
