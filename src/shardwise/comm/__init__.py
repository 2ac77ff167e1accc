"""Communication: process groups, collectives, and the ledger that records them.

The names of `shardwise.comm.api` (collectives for scripts) and of `shardwise.comm.setup` are available here; they are
loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {"comms_logger": "logger", "init_distributed": "setup", "ReduceOp": "api", "ProcessGroup": "api"}


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module 'shardwise.comm' has no attribute {name!r}")
    try:
        return importlib.import_module(f"shardwise.comm.{name}")
    except ModuleNotFoundError as missing:
        if missing.name != f"shardwise.comm.{name}":
            raise
    module = importlib.import_module(f"shardwise.comm.{_HOMES.get(name, 'api')}")
    try:
        return getattr(module, name)
    except AttributeError:
        raise AttributeError(f"module 'shardwise.comm' has no attribute {name!r}") from None
