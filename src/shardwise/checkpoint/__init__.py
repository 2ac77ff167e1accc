"""Checkpoints on disk: written whole or not at all, read by name and range, without pickle.

`engine.save_checkpoint` and `engine.load_checkpoint` are what training scripts use. The names here look at a
checkpoint without an engine.
"""

from shardwise.checkpoint.exporting import Exported, export
from shardwise.checkpoint.manifest import Manifest, Slice, StoredTensor
from shardwise.checkpoint.reader import Checkpoint, verify
from shardwise.checkpoint.report import LoadReport, WrongShape
from shardwise.checkpoint.source import Source, SourceTensor, open_source

__all__ = [
    "Checkpoint",
    "Exported",
    "LoadReport",
    "Manifest",
    "Slice",
    "Source",
    "SourceTensor",
    "StoredTensor",
    "WrongShape",
    "export",
    "open_source",
    "verify",
]
