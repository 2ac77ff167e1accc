"""Communication: process groups, collectives for scripts, and the ledger. A name is loaded when it is first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.comm.api import (
        Group,
        ProcessGroup,
        ReduceOp,
        all_gather,
        all_gather_into_tensor,
        all_gather_object,
        all_reduce,
        all_to_all,
        all_to_all_single,
        barrier,
        broadcast,
        broadcast_object_list,
        configure,
        destroy_process_group,
        gather,
        get_all_ranks_from_group,
        get_comm_operation_count,
        get_global_rank,
        get_local_rank,
        get_logged_comm_ops,
        get_rank,
        get_world_group,
        get_world_size,
        has_comm_data,
        irecv,
        is_available,
        is_initialized,
        isend,
        log_summary,
        monitored_barrier,
        new_group,
        recv,
        reduce,
        reduce_scatter,
        reduce_scatter_tensor,
        reset_log,
        scatter,
        send,
        straggler_summary,
    )
    from shardwise.comm.logger import comms_logger
    from shardwise.comm.setup import init_distributed

__all__ = [
    "Group",
    "ProcessGroup",
    "ReduceOp",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "comms_logger",
    "configure",
    "destroy_process_group",
    "gather",
    "get_all_ranks_from_group",
    "get_comm_operation_count",
    "get_global_rank",
    "get_local_rank",
    "get_logged_comm_ops",
    "get_rank",
    "get_world_group",
    "get_world_size",
    "has_comm_data",
    "init_distributed",
    "irecv",
    "is_available",
    "is_initialized",
    "isend",
    "log_summary",
    "monitored_barrier",
    "new_group",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "reset_log",
    "scatter",
    "send",
    "straggler_summary",
]
_HOMES = {"comms_logger": "logger", "init_distributed": "setup"}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in __all__:
            value = getattr(importlib.import_module(f"shardwise.comm.{_HOMES.get(name, 'api')}"), name)
            globals()[name] = value  # Because scripts call collectives in loops, the next access is a plain lookup.
            return value
        raise AttributeError(f"module 'shardwise.comm' has no attribute {name!r}")
