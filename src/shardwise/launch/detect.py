"""Detects which package `deepspeed` would be imported: none, the drop-in, or DeepSpeed."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from dataclasses import dataclass
from importlib.machinery import BuiltinImporter, FrozenImporter, ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

ROOT = "deepspeed"
DROP_IN: Literal["drop-in"] = "drop-in"
REAL: Literal["real"] = "real"
UNKNOWN = "of unknown version"


@dataclass(frozen=True)
class Detected:
    """An importable package `deepspeed` (drop-in or DeepSpeed), with the version of its distribution."""

    kind: Literal["drop-in", "real"]
    version: str
    place: str


def installed() -> list[Detected]:
    """Return the installed packages `deepspeed`, without running their code; the first one is imported. Modules of
    `shardwise.install_as_deepspeed` are ignored.
    """
    found: dict[str, Detected] = {}
    for finder in sys.meta_path:
        if finder is PathFinder:
            for entry in dict.fromkeys(path or os.getcwd() for path in sys.path):
                _note(found, PathFinder.find_spec(ROOT, [entry]), entry)
        elif finder not in (BuiltinImporter, FrozenImporter) and not type(finder).__module__.startswith("shardwise"):
            find: Any = getattr(finder, "find_spec", None)  # editable installations have their own finders
            _note(found, find(ROOT, None) if find is not None else None, None)
    return list(found.values())


def _note(found: dict[str, Detected], spec: ModuleSpec | None, entry: str | None) -> None:
    if spec is None or spec.origin is None or not os.path.isfile(spec.origin):
        return
    place = os.path.dirname(os.path.abspath(spec.origin))
    source = Path(spec.origin).read_text(encoding="utf-8", errors="replace")
    kind = DROP_IN if "shardwise_deepspeed" in source else REAL
    path = {} if entry is None else {"path": [entry]}
    found.setdefault(place, Detected(kind, _version(path), place))


def _version(path: dict[str, list[str]]) -> str:
    context = importlib.metadata.DistributionFinder.Context(name=ROOT, **path)
    for distribution in importlib.metadata.MetadataPathFinder.find_distributions(context):
        return distribution.version
    return UNKNOWN


def version_of(module: ModuleType) -> str:
    """Return the version of an imported package."""
    return str(getattr(module, "__version__", UNKNOWN))
