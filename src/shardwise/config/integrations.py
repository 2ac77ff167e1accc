"""Client libraries of a configuration: the values they write for "auto", and the keys they read.

The Trainer (transformers), Accelerate, Lightning and TRL share the file with the engine. A key without effect on the
engine may control one of them, and is not called harmless.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .normalize import Scan
from .problems import Note, dotted
from .schema.not_built import table


class Fill(NamedTuple):
    """A value that clients write in the place of an "auto" (None: it depends on the model or the data), and who."""

    value: Any
    source: str


FILLS = {path: Fill(row.get("value"), row["source"]) for path, row in table("clients.toml")["fills"].items()}
READ: dict[str, str] = table("clients.toml")["read"]


def read_by_clients(found: Scan) -> dict[str, str]:
    """Return the keys of a configuration that clients act upon, by canonical path, with the clients' action."""
    given = {dotted(path) for path in found.given}
    return {path: source for path, source in READ.items() if path in given}


def fills(found: Scan) -> list[Note]:
    """Return a note on each "auto" that clients replace, with the Trainer's default."""
    return [
        Note(dotted(found.given[path]), fill.value, f"filled by the client. {fill.source}")
        for path in found.autos
        if (fill := FILLS.get(dotted(path))) is not None
    ]
