"""What Accelerate, the Trainer through it, and Lightning have to be told.

On CPU ranks Accelerate knows no backend for DeepSpeed. It lets `deepspeed.comm` start the process group, and then
counts one process, because its own backend is None: every rank would train on the same data. `PartialState` calls
`is_initialized()` and `init_distributed()` of `deepspeed.comm` in the middle of its constructor, before it counts, and
its attributes are in a dictionary that all its instances share. So the backend of the process group can be told there.

Lightning's Trainer asks its module for a state dict before it lets the engine write a checkpoint, and writes none of
it. Parameters that are not there between passes refuse to be copied, so it gets them as they are.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise import engine
from shardwise.comm import api, setup
from shardwise.device import choose_device
from shardwise.errors import UsageError
from shardwise.utils.logging import warn_once
from shardwise.zero.units import released

_GATHER = "stage3_gather_16bit_weights_on_model_save"
_LIGHTNING = ("lightning.pytorch", "pytorch_lightning")


@functools.wraps(setup.init_distributed)
def init_distributed(*args: Any, **kwargs: Any) -> None:
    """Start or adopt the default process group, as `shardwise.init_distributed`; Accelerate is told its backend."""
    setup.init_distributed(*args, **kwargs)
    _tell_backend()


def is_initialized() -> bool:
    """Whether there is a default process group; if there is, Accelerate is told its backend."""
    there = api.is_initialized()
    if there:
        _tell_backend()
    return there


def initialize_mesh_device(mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]) -> DeviceMesh:
    """Return a mesh of all ranks, for `initialize(mesh_param=...)`; all ranks call, after `init_distributed`."""
    return init_device_mesh(
        choose_device(setup.local_rank()).type, tuple(mesh_shape), mesh_dim_names=tuple(mesh_dim_names)
    )


@functools.wraps(engine.initialize)
def initialize(*args: Any, **kwargs: Any) -> Any:
    """Shard a model for training, as `shardwise.initialize`, after what Accelerate believes has been compared.

    Raises:
        UsageError: Accelerate makes this engine, and counts another number of processes than there are ranks.
    """
    if _uses_deepspeed():
        setup.init_distributed(verbose=False)
        _compare_counts()
    made = engine.initialize(*args, **kwargs)
    if _uses_deepspeed():
        _warn_of_saving(made[0])
    _let_lightning_save(made[0].module)
    return made


def _let_lightning_save(module: Any) -> None:
    """Have the strategy of Lightning's Trainer, if it makes this engine, ask for no values that it does not write."""
    kinds = [getattr(sys.modules.get(name), "LightningModule", None) for name in _LIGHTNING]
    if not any(kind is not None and isinstance(module, kind) for kind in kinds):
        return
    with contextlib.suppress(AttributeError, RuntimeError):  # no Trainer has it
        strategy = module.trainer.strategy
        if hasattr(strategy, "lightning_module_state_dict"):
            strategy.lightning_module_state_dict = functools.partial(_state_dict, module)


def _state_dict(module: nn.Module) -> dict[str, Any]:
    """Return a module's state dict; values that are not there say so when they are used."""
    found = module.state_dict(keep_vars=True)
    return {
        name: value.detach() if isinstance(value, torch.Tensor) and not released.is_released(value) else value
        for name, value in found.items()
    }


def _tell_backend() -> None:
    """Fill in the backend of a PartialState that is being made, has none, and has not counted the processes yet."""
    state = _state("PartialState")
    if "backend" in state and state["backend"] is None and "num_processes" not in state and "LOCAL_RANK" in os.environ:
        state["backend"] = dist.get_backend()


def _state(name: str) -> dict[str, Any]:
    """The attributes that all instances of a class of `accelerate.state` share; nothing if it is not imported."""
    return getattr(getattr(sys.modules.get("accelerate.state"), name, None), "_shared_state", {})


def _uses_deepspeed() -> bool:
    return getattr(_state("AcceleratorState").get("distributed_type"), "name", None) == "DEEPSPEED"


def _compare_counts() -> None:
    counted, ranks = _state("AcceleratorState").get("num_processes"), dist.get_world_size()
    if counted is None or counted == ranks:
        return
    raise UsageError(
        f"Accelerate counts {counted} process{'es' if counted != 1 else ''}, but there are {ranks} ranks: every rank "
        'would get the data of all, and batch sizes that are left to "auto" would not fit. Its state was made before '
        "it knew of DeepSpeed, or without LOCAL_RANK in the environment. Start the script with the command deepspeed, "
        "`shardwise run`, torchrun or `accelerate launch`; and if it makes a PartialState() before its Accelerator, "
        'set ACCELERATE_USE_DEEPSPEED=true in the environment, or write PartialState(backend="gloo")'
    )


def _warn_of_saving(made: Any) -> None:
    if made.zero_optimization_stage() < 3 or made.zero_gather_16bit_weights_on_model_save() or made.optimizer is None:
        return
    if dist.get_rank() == 0:
        warn_once(
            f"zero_optimization.{_GATHER} is not true: at stage 3 Accelerate's get_state_dict and save_model will "
            "raise an error, and the Trainer's save_model will write a checkpoint instead of weights that plain "
            "transformers reads. "
            f'Set "{_GATHER}": true, or zero3_save_16bit_model: true in a file or plugin of Accelerate'
        )
