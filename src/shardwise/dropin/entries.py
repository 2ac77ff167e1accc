"""Kinds of entries of the table."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["class", "exception", "function", "value", "module", "member"]


@dataclass(frozen=True)
class Alias:
    """A name that is served.

    `target` is `package.module:attribute` of shardwise; of a module, its path in the drop-in; empty for a member, which
    is looked up in its class. `signature` has the arguments that scripts may rely on, as in a `def`; "..." for a
    default means any; None: not declared. The target may take further arguments.
    """

    kind: Kind
    target: str
    signature: str | None = None


@dataclass(frozen=True)
class Stub:
    """A name that can be imported, passed on and derived from, and raises when used. `reason` ends a sentence that
    begins with the name.
    """

    kind: Kind
    reason: str


@dataclass(frozen=True)
class Missing:
    """A name that is absent: importing it is an ImportError, reading it an AttributeError. `reason` is as for `Stub`.
    `probed_by` are callers that test for the name by the error, hence no stub; members of classes are always tested so.
    """

    reason: str
    probed_by: str = ""


Entry = Alias | Stub | Missing
Entries = Mapping[str, Entry]

_KINDS: tuple[Kind, ...] = ("class", "exception", "function", "value")
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
    """Return entries for functions of the module `home`: `name(arguments)`, and ` = target name` if that differs."""
    return _served("function", home, declarations)


def classes(home: str, *declarations: str) -> dict[str, Entry]:
    """Return entries for classes of the module `home`, with the arguments of their constructors."""
    return _served("class", home, declarations)


def values(home: str, *declarations: str) -> dict[str, Entry]:
    """Return entries for other objects of the module `home`."""
    return _served("value", home, declarations)


def modules(*declarations: str) -> dict[str, Entry]:
    """Return entries for other names of modules of the drop-in: `name = deepspeed.its.path`."""
    made: dict[str, Entry] = {}
    for declaration in declarations:
        name, _, target = declaration.partition(" = ")
        made[name] = Alias("module", target)
    return made


def stubs(reason: str, names: str) -> dict[str, Entry]:
    """Return stubs for names; the spelling (`Class`, `SomeError`, `CONSTANT`, `function`) or `name:kind` gives the
    kind.
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


def missing(reason: str, names: str, probed_by: str = "") -> dict[str, Entry]:
    """Return entries for absent names ("*": the whole module), with the callers that test for them."""
    return dict.fromkeys(names.split(), Missing(reason, probed_by))


def merge(*parts: Entries) -> dict[str, Entry]:
    """Merge the entries of one module. Raises ValueError if a name occurs twice."""
    made: dict[str, Entry] = {}
    for part in parts:
        twice = made.keys() & part.keys()
        if twice:
            raise ValueError(f"in the table twice: {', '.join(sorted(twice))}")
        made.update(part)
    return made


def members(*declarations: str) -> dict[str, Entry]:
    """Return entries for members of a class, several in a string, of which only the last may have arguments."""
    made: dict[str, Entry] = {}
    for declaration in declarations:
        plain, opened, arguments = declaration.partition("(")
        *others, last = plain.split()
        made.update({name: Alias("member", "") for name in others})
        made[last] = Alias("member", "", f"({arguments}" if opened else None)
    return made
