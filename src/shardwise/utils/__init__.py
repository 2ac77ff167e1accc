"""Helpers for training scripts: access to whole values of sharded parameters, loaders, logging."""

from __future__ import annotations

import importlib
from typing import Any

_PUBLIC = {
    "safe_get_full_fp32_param": "shardwise.zero.access",
    "safe_get_full_grad": "shardwise.zero.access",
    "safe_get_full_optimizer_state": "shardwise.zero.access",
    "safe_set_full_fp32_param": "shardwise.zero.access",
    "safe_set_full_grad": "shardwise.zero.access",
    "safe_set_full_optimizer_state": "shardwise.zero.access",
    "safe_get_local_fp32_param": "shardwise.zero.access",
    "safe_get_local_grad": "shardwise.zero.access",
    "safe_get_local_optimizer_state": "shardwise.zero.access",
    "safe_set_local_fp32_param": "shardwise.zero.access",
    "safe_set_local_grad": "shardwise.zero.access",
    "safe_set_local_optimizer_state": "shardwise.zero.access",
    "safe_update_full_grad_vectorized": "shardwise.zero.access",
    "memory_status": "shardwise.memory",
    "see_memory_usage": "shardwise.memory",
    "RepeatingLoader": "shardwise.data",
    "instrument_w_nvtx": "shardwise.utils.nvtx",
    "log_dist": "shardwise.utils.logging",
    "logger": "shardwise.utils.logging",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'shardwise.utils' has no attribute {name!r}")
