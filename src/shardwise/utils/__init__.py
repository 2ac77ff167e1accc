"""Helpers for training scripts: access to unsharded values of sharded parameters, loaders, logging."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.data import RepeatingLoader
    from shardwise.memory import memory_status, see_memory_usage
    from shardwise.utils.logging import log_dist, logger
    from shardwise.utils.nvtx import instrument_w_nvtx
    from shardwise.zero.access import (
        safe_get_full_fp32_param,
        safe_get_full_grad,
        safe_get_full_optimizer_state,
        safe_get_local_fp32_param,
        safe_get_local_grad,
        safe_get_local_optimizer_state,
        safe_set_full_fp32_param,
        safe_set_full_grad,
        safe_set_full_optimizer_state,
        safe_set_local_fp32_param,
        safe_set_local_grad,
        safe_set_local_optimizer_state,
        safe_update_full_grad_vectorized,
    )

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

__all__ = [
    "RepeatingLoader",
    "instrument_w_nvtx",
    "log_dist",
    "logger",
    "memory_status",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
    "see_memory_usage",
]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in _PUBLIC:
            return getattr(importlib.import_module(_PUBLIC[name]), name)
        raise AttributeError(f"module 'shardwise.utils' has no attribute {name!r}")
