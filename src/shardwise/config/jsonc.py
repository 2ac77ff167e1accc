"""Reading JSON with comments (`//`, `#`, `/* */`) and trailing commas, which people use in configuration files.

Because other readers refuse both, they are reported. Duplicate keys are kept for the caller to refuse.
"""

from __future__ import annotations

import json
import re
from typing import Any

DEEPEST = 64
_STRING = r'"(?:[^"\\\n]|\\.)*"'
_EXTENSIONS = {
    "a comment": re.compile(_STRING + r"|(//[^\n]*|#[^\n]*|/\*.*?\*/)", re.DOTALL),
    "a trailing comma": re.compile(_STRING + r"|(,)(?=\s*[}\]])", re.DOTALL),
}


class JSONSyntaxError(ValueError):
    """The text is not JSON; the message has line and column."""


class Members(dict[str, Any]):
    """A JSON object; `twice` has its duplicate keys."""

    twice: tuple[str, ...] = ()


def parse(text: str) -> tuple[Any, dict[str, int]]:
    """Return the value of a text, and the used extensions with the line of first use. Raises JSONSyntaxError.

    >>> parse('{"a": 1,  // one\\n "b": [2, 3,],}')
    ({'a': 1, 'b': [2, 3]}, {'a comment': 1, 'a trailing comma': 2})
    """
    plain, used = text.removeprefix("\ufeff"), {}
    for name, pattern in _EXTENSIONS.items():
        first = next((found for found in pattern.finditer(plain) if found[1]), None)
        if first is not None:
            used[name] = plain.count("\n", 0, first.start()) + 1
            # Blanks take the place of the extension, so that lines and columns of errors are those of the text.
            plain = pattern.sub(lambda found: re.sub(r"[^\n]", " ", found[0]) if found[1] else found[0], plain)
    try:
        return json.loads(plain, object_pairs_hook=_members), used
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise JSONSyntaxError(f"{where}: {error.msg.lower()}{_advice(plain, error.pos)}") from None
    except RecursionError:
        raise JSONSyntaxError(f"nested more than {DEEPEST} deep") from None
    except ValueError as error:
        raise JSONSyntaxError(f"{error}") from None


def _members(pairs: list[tuple[str, Any]]) -> Members:
    found = Members(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        found.twice = tuple(name for name in found if names.count(name) > 1)
    return found


def _advice(text: str, position: int) -> str:
    word = re.match(r"[\w.+-]+|'", text[position:])
    if word is None:
        return "" if text[position:].strip() else " (is a closing brace missing?)"
    if word[0] in ("True", "False", "None"):
        return f"; {word[0]} is Python, JSON writes true, false, null"
    return f", found {text[position : position + 20].splitlines()[0]!r}; names and strings need double quotes"
