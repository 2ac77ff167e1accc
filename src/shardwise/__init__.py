"""shardwise: train models that do not fit one device.

Public names are loaded when they are first used, so that importing the package costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import Any

from shardwise._allocator import set_allocator
from shardwise._version import __version__

_PUBLIC = {
    "initialize": "shardwise.engine",
    "initialize_engine": "shardwise.engine",
    "Engine": "shardwise.engine",
    "init_distributed": "shardwise.comm.setup",
    "add_config_arguments": "shardwise.launch.arguments",
    "add_tuning_arguments": "shardwise.schedules",
    "RepeatingLoader": "shardwise.data",
    "declare_part": "shardwise.registry",
    "offload_activations": "shardwise.offload",
    "tp_model_init": "shardwise.parallel",
    "install_as_deepspeed": "shardwise.dropin",
}
_MODULES = {
    name: f"shardwise.{name}"
    for name in (
        "checkpoint",
        "comm",
        "config",
        "data",
        "errors",
        "memory",
        "moe",
        "optim",
        "parallel",
        "profile",
        "schedules",
        "utils",
        "zero",
    )
} | {"checkpointing": "shardwise.recompute"}

__all__ = [
    "Engine",
    "RepeatingLoader",
    "__version__",
    "add_config_arguments",
    "add_tuning_arguments",
    "declare_part",
    "init_distributed",
    "initialize",
    "initialize_engine",
    "install_as_deepspeed",
    "offload_activations",
    "tp_model_init",
]


set_allocator()  # before the first tensor is made


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    raise AttributeError(f"module 'shardwise' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
