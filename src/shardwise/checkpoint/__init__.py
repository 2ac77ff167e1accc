"""Checkpoints on disk: published atomically, read by name and range, without pickle.

Training scripts use `engine.save_checkpoint` and `engine.load_checkpoint`; the names here open a checkpoint without an
engine. They load at first use, because other packages import single modules of this one.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.checkpoint.exporting import Exported, export
    from shardwise.checkpoint.kinds import register_type
    from shardwise.checkpoint.manifest import Manifest, Slice, StoredTensor
    from shardwise.checkpoint.match import LoadReport, WrongShape
    from shardwise.checkpoint.opening import open_source
    from shardwise.checkpoint.reader import Checkpoint, verify
    from shardwise.checkpoint.weights_reader import WeightsReader

_PUBLIC = {
    "Checkpoint": "shardwise.checkpoint.reader",
    "Exported": "shardwise.checkpoint.exporting",
    "LoadReport": "shardwise.checkpoint.match",
    "Manifest": "shardwise.checkpoint.manifest",
    "Slice": "shardwise.checkpoint.manifest",
    "StoredTensor": "shardwise.checkpoint.manifest",
    "WeightsReader": "shardwise.checkpoint.weights_reader",
    "WrongShape": "shardwise.checkpoint.match",
    "export": "shardwise.checkpoint.exporting",
    "open_source": "shardwise.checkpoint.opening",
    "register_type": "shardwise.checkpoint.kinds",
    "verify": "shardwise.checkpoint.reader",
}

__all__ = [
    "Checkpoint",
    "Exported",
    "LoadReport",
    "Manifest",
    "Slice",
    "StoredTensor",
    "WeightsReader",
    "WrongShape",
    "export",
    "open_source",
    "register_type",
    "verify",
]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in _PUBLIC:
            return getattr(importlib.import_module(_PUBLIC[name]), name)
        raise AttributeError(f"module 'shardwise.checkpoint' has no attribute {name!r}")
