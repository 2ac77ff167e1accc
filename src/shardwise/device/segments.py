"""How torch takes memory of a CUDA device: in segments that grow, where buffers of many sizes come and go."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

import torch

from shardwise.compat import allocator_settings, set_allocator_settings

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""In which users say how they want it."""

_log = logging.getLogger("shardwise")

_GROW = "expandable_segments:True"


def let_segments_grow(device: torch.device, env: Mapping[str, str] = os.environ) -> bool:
    """Have memory that is taken from now on lie in segments that grow; return whether it was done.

    It holds for the whole process, and is logged. Otherwise each large tensor that finds no room gets a segment of its
    size, and what is free in others is too small for the next one: with inputs of different lengths the process takes
    more and more. Nothing is done where the user has chosen, by a variable or by a call, and where torch cannot.

    >>> let_segments_grow(torch.device("cpu"))
    False
    """
    if device.type != "cuda" or any(env.get(name) for name in VARIABLES) or allocator_settings():
        return False
    done = set_allocator_settings(_GROW)
    if done:
        _log.info(
            "CUDA allocator: expandable segments are on for this process (config key expandable_segments). False keeps "
            "torch's default, for memory pools, NCCL user buffers and CUDA IPC"
        )
    return done
