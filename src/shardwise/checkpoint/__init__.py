"""Checkpoints on disk: written whole or not at all, read by name and range, without pickle.

`engine.save_checkpoint` and `engine.load_checkpoint` are what training scripts use. The names here look at a
checkpoint without an engine. They are loaded when they are first used: the process that writes in the background needs
modules of this package, and not torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.checkpoint.manifest import Manifest, Slice, StoredTensor
    from shardwise.checkpoint.reader import Checkpoint, verify

_PUBLIC = {
    "Checkpoint": "shardwise.checkpoint.reader",
    "Manifest": "shardwise.checkpoint.manifest",
    "Slice": "shardwise.checkpoint.manifest",
    "StoredTensor": "shardwise.checkpoint.manifest",
    "verify": "shardwise.checkpoint.reader",
}

__all__ = ["Checkpoint", "Manifest", "Slice", "StoredTensor", "verify"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'shardwise.checkpoint' has no attribute {name!r}")
