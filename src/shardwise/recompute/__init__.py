"""Activation checkpointing: the backward pass recomputes activations of a function instead of keeping them.

A model calls `checkpoint` around its blocks, at any ZeRO stage; an engine's configuration only adds options.
The options of scripts written for DeepSpeed (`deepspeed.checkpointing`) are in the drop-in.
"""

from shardwise.recompute.checkpoint import checkpoint
from shardwise.recompute.rng_tracker import (
    CudaRNGStatesTracker,
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
    model_parallel_reconfigure_tp_seed,
)
from shardwise.recompute.selective import selective_contexts
from shardwise.recompute.timing import CheckpointTimes, times

__all__ = [
    "CheckpointTimes",
    "CudaRNGStatesTracker",
    "checkpoint",
    "get_cuda_rng_tracker",
    "model_parallel_cuda_manual_seed",
    "model_parallel_reconfigure_tp_seed",
    "selective_contexts",
    "times",
]
