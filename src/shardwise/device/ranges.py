"""Named ranges: what a profiler's trace says about the time between a model's own operators."""

from __future__ import annotations

import torch


def named(what: str, unit: str = "") -> torch.profiler.record_function:
    """Return a context that torch's profiler (and NVTX, under `emit_nvtx`) shows by this name.

    Args:
        what: "gather", "wait for gather", "reduce", "wait for reduction" or "step".
        unit: whose parameters or gradients they are.

    Example:
        >>> with torch.profiler.profile() as profile, named("gather", "layers.0"):
        ...     pass
        >>> profile.events()[0].name
        'shardwise::gather layers.0'
    """
    return torch.profiler.record_function(f"shardwise::{what} {unit}".rstrip())
