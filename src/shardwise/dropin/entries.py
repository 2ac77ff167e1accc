"""The words of the table: what a name of DeepSpeed's is here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["class", "exception", "function", "value", "module", "member"]


@dataclass(frozen=True)
class Alias:
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
class Stub:
    """A name that can be imported, passed on and derived from, and raises when it is used.

    Attributes:
        kind: what stands in for it: a class, an exception, a function or a value.
        reason: why there is nothing behind it; the end of a sentence that begins with the name.
    """

    kind: Kind
    reason: str


@dataclass(frozen=True)
class Missing:
    """A name that is not there: importing it is an ImportError, reading it an AttributeError.

    Attributes:
        reason: why; the end of a sentence that begins with the name.
        asked: who takes the error for an answer, so that a stand-in would mislead; empty for members of classes, which
            are always asked for in this way.
    """

    reason: str
    asked: str = ""


Entry = Alias | Stub | Missing
Entries = Mapping[str, Entry]

_KINDS: tuple[Kind, ...] = ("class", "exception", "function", "value")
"""What can be stood in for."""

_DECLARATION = re.compile(r"(?P<name>\w+)(?P<signature>\(.*\))?(?:\s*=\s*(?P<target>[\w.]+))?", re.DOTALL)


def _served(kind: Kind, home: str, declarations: Iterable[str]) -> dict[str, Entry]:
    made: dict[str, Entry] = {}
    for declaration in declarations:
        match = _DECLARATION.fullmatch(declaration)
        if match is None:
            raise ValueError(f"not `name`, `name(arguments)` or either followed by `= other_name`: {declaration!r}")
        made[match["name"]] = Alias(kind, f"{home}:{match['target'] or match['name']}", match["signature"])
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
        made[name] = Alias("module", target)
    return made


def raising(reason: str, names: str) -> dict[str, Entry]:
    """Names, separated by spaces, that raise when they are used.

    What they are follows from their spelling (`Class`, `SomeError`, `CONSTANT`, `function`), or stands behind a colon
    (`name:class`).
    """
    made: dict[str, Entry] = {}
    for declaration in names.split():
        name, _, kind = declaration.partition(":")
        made[name] = Stub(_kind(kind) if kind else _spelled(name), reason)
    return made


def _kind(text: str) -> Kind:
    for kind in _KINDS:
        if kind == text:
            return kind
    raise ValueError(f"a stand-in is one of {', '.join(_KINDS)}, not {text!r}")


def _spelled(name: str) -> Kind:
    bare = name.lstrip("_")
    if bare.isupper() and len(bare) > 1:
        return "value"
    if bare.endswith(("Error", "Exception")):
        return "exception"
    return "class" if bare[:1].isupper() else "function"


def absent(reason: str, names: str, asked: str = "") -> dict[str, Entry]:
    """Names, separated by spaces, that are not there, and who asks whether they are ("*": the whole module)."""
    return dict.fromkeys(names.split(), Missing(reason, asked))


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
        made.update({name: Alias("member", "") for name in others})
        made[last] = Alias("member", "", f"({arguments}" if opened else None)
    return made
