"""Collecting the problems of a configuration, to report them in one error."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from shardwise.errors import ConfigError

Path = tuple[str | int, ...]
"""Keys and list indices from the root to a value."""


LISTED = 20
"""Number of problems that a message describes, because a wrong file may have thousands."""
_LONGEST = 300


def dotted(path: Path) -> str:
    """Return a path as people write it.

    >>> dotted(("tensor_parallel", "partition_config", "layer_specs", 0, "patterns"))
    'tensor_parallel.partition_config.layer_specs[0].patterns'
    """
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


@dataclass(frozen=True)
class Problem:
    """One mistake: its path, the problem and the fix, and the class of its error."""

    path: str
    message: str
    error: type[ConfigError] = ConfigError

    def __str__(self) -> str:
        path = self.path if len(self.path) <= _LONGEST else self.path[:_LONGEST] + "..."
        return f"{path}: {self.message}"


def another_name(first: str) -> str:
    """Return the message for a key that is given under two names, of which `first` was read."""
    return f"this is another name of `{first}`, which is given too; keep one of them"


class Note(NamedTuple):
    """A value that the user did not write, or wrote under another key, and the reason."""

    path: str
    value: Any
    reason: str


def raise_problems(problems: Iterable[Problem], origin: str) -> None:
    """Raise one error that lists the problems, of their class if they agree, otherwise `ConfigError`."""
    found = list(dict.fromkeys(problems))
    if len(found) == 1:
        raise error_of(found, f"in {origin}: {found[0]}")
    if found:
        lines = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(found[:LISTED], 1))
        more = f"\n  and {len(found) - LISTED} more" if len(found) > LISTED else ""
        raise error_of(found, f"{len(found)} problems in {origin}:\n{lines}{more}")


def error_of(problems: list[Problem], text: str) -> ConfigError:
    """Return an error with these problems, of their class if they agree, otherwise `ConfigError`."""
    classes = {problem.error for problem in problems}
    error = (classes.pop() if len(classes) == 1 else ConfigError)(text)
    error.problems = tuple(problems)
    return error
