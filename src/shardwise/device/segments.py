"""Expandable segments of torch's CUDA allocator, for buffers of many sizes."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

import torch

from shardwise.compat import allocator_settings, set_allocator_settings

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables of the user's allocator settings."""

_log = logging.getLogger("shardwise")

_GROW = "expandable_segments:True"


def let_segments_grow(device: torch.device, env: Mapping[str, str] = os.environ) -> bool:
    """Enable expandable segments for memory allocated from now on, unless the user has set the allocator; log it.

    Because each large tensor that fits no free block otherwise gets a segment of its size, inputs of different lengths
    fragment free memory. The setting holds for the whole process. Returns False if nothing is set.

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
