"""Collecting what is wrong with a configuration, so that everything is reported in one error.

A configuration file is edited by hand and tried on a cluster; a message that names one mistake at a time
costs a round trip per mistake.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from shardwise.errors import ConfigError

Path = tuple[str | int, ...]
"""Keys and list indices from the root to a value."""


LISTED = 20
"""Problems that a message describes; a file that is no configuration at all has thousands."""
_LONGEST = 300
"""Characters of a name that a message shows."""


def dotted(path: Path) -> str:
    """Write a path the way people do.

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
    """One mistake: where it is, what is wrong and the fix, which error stands for it, its line if in a file."""

    path: str
    message: str
    error: type[ConfigError] = ConfigError
    line: int | None = None

    def __str__(self) -> str:
        path = self.path if len(self.path) <= _LONGEST else self.path[:_LONGEST] + "..."
        where = path if self.line is None else f"{path} (line {self.line})"
        return f"{where}: {self.message}"


class Note(NamedTuple):
    """A value that the user did not write, or wrote elsewhere, and why it is what it is."""

    path: str
    value: Any
    reason: str


def raise_problems(problems: Iterable[Problem], origin: str) -> None:
    """Raise one error that lists the problems, the first `LISTED` of them in words; do nothing if there is none.

    The class is that of the problems if they agree, otherwise `ConfigError`.
    """
    found = list(dict.fromkeys(problems))
    if not found:
        return
    classes = {problem.error for problem in found}
    error = classes.pop() if len(classes) == 1 else ConfigError
    if len(found) == 1:
        text = f"in {origin}: {found[0]}"
    else:
        lines = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(found[:LISTED], 1))
        if len(found) > LISTED:
            lines += f"\n  and {len(found) - LISTED} more"
        text = f"{len(found)} problems in {origin}:\n{lines}"
    raised = error(text)
    raised.problems = tuple(found)
    raise raised
