"""shardwise: train models that do not fit one device.

Public names are loaded on first use, because importing the package should be fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shardwise._allocator import set_allocator
from shardwise._version import __version__

# Type checkers and editors read these imports; at run time `__getattr__` loads a name when it is first used.
if TYPE_CHECKING:
    from shardwise import (
        attention,
        checkpoint,
        comm,
        compression,
        config,
        data,
        errors,
        inference,
        memory,
        moe,
        optim,
        parallel,
        pipe,
        plan,
        profile,
        ray,
        schedules,
        utils,
        zero,
    )
    from shardwise import recompute as checkpointing
    from shardwise.comm.setup import init_distributed
    from shardwise.data import RepeatingLoader
    from shardwise.dropin import install_as_deepspeed
    from shardwise.engine import Engine, Training, initialize
    from shardwise.engine.inference import init_inference
    from shardwise.inference import InferenceEngine, default_inference_config
    from shardwise.offload import offload_activations
    from shardwise.parallel import tp_model_init
    from shardwise.registry import declare_part

_PUBLIC = {
    "initialize": "shardwise.engine",
    "Engine": "shardwise.engine",
    "Training": "shardwise.engine",
    "init_distributed": "shardwise.comm.setup",
    "init_inference": "shardwise.engine.inference",
    "InferenceEngine": "shardwise.inference",
    "default_inference_config": "shardwise.inference",
    "RepeatingLoader": "shardwise.data",
    "declare_part": "shardwise.registry",
    "offload_activations": "shardwise.offload",
    "tp_model_init": "shardwise.parallel",
    "install_as_deepspeed": "shardwise.dropin",
}
_MODULES = {
    name: f"shardwise.{name}"
    for name in (
        "attention",
        "checkpoint",
        "comm",
        "compression",
        "config",
        "data",
        "errors",
        "inference",
        "memory",
        "moe",
        "optim",
        "parallel",
        "pipe",
        "plan",
        "profile",
        "ray",
        "schedules",
        "utils",
        "zero",
    )
} | {"checkpointing": "shardwise.recompute"}

__all__ = [
    "Engine",
    "InferenceEngine",
    "RepeatingLoader",
    "Training",
    "__version__",
    "attention",
    "checkpoint",
    "checkpointing",
    "comm",
    "compression",
    "config",
    "data",
    "declare_part",
    "default_inference_config",
    "errors",
    "inference",
    "init_distributed",
    "init_inference",
    "initialize",
    "install_as_deepspeed",
    "memory",
    "moe",
    "offload_activations",
    "optim",
    "parallel",
    "pipe",
    "plan",
    "profile",
    "ray",
    "schedules",
    "tp_model_init",
    "utils",
    "zero",
]


set_allocator()  # before the first tensor is made


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in _PUBLIC:
            return getattr(importlib.import_module(_PUBLIC[name]), name)
        if name in _MODULES:
            return importlib.import_module(_MODULES[name])
        raise AttributeError(f"module 'shardwise' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
