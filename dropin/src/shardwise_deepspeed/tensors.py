"""Tensor parallelism under DeepSpeed's names."""

from __future__ import annotations

from typing import Any

from shardwise.errors import UsageError
from shardwise.parallel.tensor.registry_marks import is_marked
from shardwise.registry import part_of


def set_autotp_mode(training: bool = False) -> None:
    """Accept training mode. Raises UsageError if `training` is False: `init_inference` divides for inference."""
    if not training:
        raise UsageError(
            "set_autotp_mode(training=False): layers for inference are divided by init_inference(). Pass "
            "training=True, or leave the call out"
        )


def is_autotp_training_mode() -> bool:
    """Return True."""
    return True


def is_model_parallel_parameter(p: Any) -> bool:
    """Return True if a parameter is sharded over a tensor-parallel group."""
    return is_marked(p) or part_of(p).box is not None
