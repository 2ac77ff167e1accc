"""Activation checkpointing: activations of a function are computed again in the backward pass instead of being kept.

As `shardwise.checkpointing` and `deepspeed.checkpointing` it has the names that existing scripts call. The engine needs
nothing of it: a model calls `checkpoint` around its blocks, at any ZeRO stage.
"""

from shardwise.recompute.checkpoint import checkpoint, non_reentrant_checkpoint
from shardwise.recompute.options import configure, is_configured, partition_activations_in_checkpoint, reset

__all__ = [
    "checkpoint",
    "configure",
    "is_configured",
    "non_reentrant_checkpoint",
    "partition_activations_in_checkpoint",
    "reset",
]
