"""Keys of features that this version lacks, by the rows of `unsupported.toml`.

`UNSUPPORTED`: without the feature the run would differ, or lack its purpose. A configuration that requests it is
refused with an alternative; a section that is off, or holds only defaults, is accepted. If only the speed differs, the
reader for DeepSpeed's files (`accept`) removes the key with a warning. `IGNORED`: without the feature the run prints
less, or differs in speed, and the key is accepted with a warning. Building a feature removes its row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shardwise.errors import NotBuiltError

from .normalize import Scan
from .problems import Note, Problem, dotted
from .schema.not_built import table
from .schema.root import Config

_PREDICATES: dict[str, Callable[[Any], bool]] = {
    "on": lambda value: value is True,
    "given": lambda value: value is not None,
    "enabled": lambda value: value is not None and value.enabled,
}


@dataclass(frozen=True)
class Feature:
    """A row: key, name of the feature, what to do instead. `requests` is the predicate of values that request the
    feature, `within` are switches that must be on as well, `speed_only`: results are the same without the feature.
    """

    path: str
    feature: str
    instead: str
    requests: Callable[[Any], bool]
    within: tuple[str, ...] = ()
    speed_only: bool = False

    def requested(self, config: Config) -> bool:
        """Return True if a configuration requests the feature."""
        return all(value_at(config, name) for name in self.within) and self.requests(value_at(config, self.path))


def _feature(row: dict[str, Any]) -> Feature:
    requests = _PREDICATES[row.get("requests", "on")]
    if "is" in row:
        requests = lambda value: value == row["is"]  # noqa: E731
    elif "is_not" in row:
        requests = lambda value: value != row["is_not"]  # noqa: E731
    return Feature(
        row["path"],
        row["feature"],
        row.get("instead", ""),
        requests,
        tuple(row.get("within", ())),
        row.get("speed_only", False),
    )


UNSUPPORTED = tuple(map(_feature, table()["unsupported"]))
IGNORED = tuple(map(_feature, table()["ignored"]))


def value_at(config: Config, path: str) -> Any:
    """Return the value at a dotted path, None if a section on the way is absent."""
    place: Any = config
    for name in path.split("."):
        place = getattr(place, name) if place is not None else None
    return place


def check_built(config: Config, found: Scan) -> list[Problem]:
    """Return one problem for each requested feature that this version lacks."""
    return [
        Problem(_as_written(row.path, found), f"this version does not have {row.feature}; {row.instead}", NotBuiltError)
        for row in UNSUPPORTED
        if row.requested(config)
    ]


def ignored_features(config: Config, found: Scan) -> list[Note]:
    """Return a note on each key that requests a feature of `IGNORED`."""
    return [
        Note(_as_written(row.path, found), value_at(config, row.path), f"accepted, and changes nothing: {row.feature}")
        for row in IGNORED
        if row.requested(config)
    ]


def _as_written(path: str, found: Scan) -> str:
    """Return the user's spelling of a key, or of the first key below it (deprecated keys may stand for a section)."""
    parts = tuple(path.split("."))
    below = (written for given, written in found.given.items() if given[: len(parts)] == parts)
    return dotted(found.given.get(parts) or next(below, parts))
