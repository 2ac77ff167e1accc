"""Keys of features that this version lacks, by the rows of `unsupported.toml`.

`UNSUPPORTED`: without the feature the run would differ, or lack its purpose. A configuration that requests it is
refused with an alternative; a section that is off, or holds only defaults, is accepted. If only the speed differs, the
reader for DeepSpeed's files (`accept`) removes the key with a warning. `IGNORED`: without the feature the run prints
less, or differs in speed, and the key is accepted with a warning. Building a feature removes its row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardwise.errors import NotBuiltError

from .conditions import holds, value_at
from .normalize import Scan
from .problems import Note, Problem, dotted
from .schema.root import Config
from .schema.tables import table

UNSUPPORTED: list[dict[str, Any]] = table()["unsupported"]
IGNORED: list[dict[str, Any]] = table()["ignored"]


def check_built(config: Config, found: Scan) -> list[Problem]:
    """Return one problem for each requested feature that this version lacks."""
    return [
        Problem(path, f"this version does not have {row['feature']}; {row['instead']}", NotBuiltError)
        for path, row in _requested(UNSUPPORTED, config, found)
    ]


def ignored_features(config: Config, found: Scan) -> list[Note]:
    """Return a note on each key that requests a feature of `IGNORED`."""
    return [
        Note(path, value_at(config, row["path"]), f"accepted, and changes nothing: {row['feature']}")
        for path, row in _requested(IGNORED, config, found)
    ]


def _requested(rows: list[dict[str, Any]], config: Config, found: Scan) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows that a configuration requests, each with the user's spelling of its key, or of the first key below
    it (deprecated keys may stand for a section).
    """
    for row in rows:
        if holds(row, config):
            parts = tuple(row["path"].split("."))
            below = (written for given, written in found.given.items() if given[: len(parts)] == parts)
            yield dotted(found.given.get(parts) or next(below, parts)), row
