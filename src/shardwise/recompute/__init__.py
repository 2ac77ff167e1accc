"""Activation checkpointing: the backward pass recomputes activations of a function instead of keeping them.

A model calls `checkpoint` around its blocks, at any ZeRO stage; an engine's configuration only adds options.
`shardwise.checkpointing` and `deepspeed.checkpointing` have the names that existing scripts call.
"""

from shardwise.recompute.checkpoint import checkpoint, non_reentrant_checkpoint
from shardwise.recompute.options import configure, is_configured, partition_activations_in_checkpoint, reset
from shardwise.recompute.rng_tracker import (
    CudaRNGStatesTracker,
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
    model_parallel_reconfigure_tp_seed,
)
from shardwise.recompute.timing import CheckpointTimes, times

__all__ = [
    "CheckpointTimes",
    "CudaRNGStatesTracker",
    "checkpoint",
    "configure",
    "get_cuda_rng_tracker",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "model_parallel_reconfigure_tp_seed",
    "non_reentrant_checkpoint",
    "partition_activations_in_checkpoint",
    "reset",
    "times",
]
