"""Adaptations for Accelerate, the Trainer, and Lightning.

On CPU ranks Accelerate counts one process, because its backend for DeepSpeed is None: every rank would train on the
same data. The constructor of `PartialState` calls `is_initialized()` and `init_distributed()` of `deepspeed.comm`
before it counts; these set the backend in the dictionary that all its instances share.

Accelerate has tensor parallelism by `tensor_parallel.autotp_size` or `ParallelismConfig(tp_size=...)`, and gives a
group's ranks equal samples, but Accelerate and the Trainer count each rank in `train_batch_size`. Only with the first
do they know that a state dict is sharded; the second is not passed on.

Lightning's Trainer takes, but does not write, a state dict of its module before the engine writes a checkpoint. It gets
resharded parameters as they are, because these cannot be copied.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.comm import api, setup
from shardwise.config import accept, resolve
from shardwise.data import EngineDataLoader
from shardwise.device import choose_device
from shardwise.engine.build import EngineArguments, build, check_model
from shardwise.errors import ConflictError, UsageError
from shardwise.parallel.tensor.dtensors import line_of
from shardwise.parallel.tensor.entry import divided_over
from shardwise.utils.logging import warn_once
from shardwise.zero.units import released
from shardwise_deepspeed import attributes, groups
from shardwise_deepspeed.arguments import config_source
from shardwise_deepspeed.engine import DeepSpeedEngine, PipelineEngine

_TENSOR = "tensor_parallel.autotp_size"
_GATHER = "stage3_gather_16bit_weights_on_model_save"
_LIGHTNING = ("lightning.pytorch", "pytorch_lightning")


@functools.wraps(setup.init_distributed)
def init_distributed(*args: Any, **kwargs: Any) -> None:
    """Start or adopt the default process group, as `shardwise.init_distributed`; sets Accelerate's backend."""
    setup.init_distributed(*args, **kwargs)
    _set_backend()


def is_initialized() -> bool:
    """Return True if there is a default process group; then sets Accelerate's backend."""
    there = api.is_initialized()
    if there:
        _set_backend()
    return there


def initialize_mesh_device(mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]) -> DeviceMesh:
    """Return a mesh of all ranks, for `initialize(mesh_param=...)`. A collective after `init_distributed`."""
    return init_device_mesh(
        choose_device(setup.local_rank()).type, tuple(mesh_shape), mesh_dim_names=tuple(mesh_dim_names)
    )


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = setup.DEFAULT_PORT,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
    loss_fn: Callable[..., Any] | None = None,
) -> tuple[DeepSpeedEngine, Any, EngineDataLoader | None, Any]:
    """Shard a model for training (`shardwise.initialize`), with DeepSpeed's arguments. Keys of the configuration that
    DeepSpeed ignores are removed, with one warning (`shardwise.config.accept`).

    Args:
        args: namespace whose `deepspeed_config` names the configuration, if `config` is missing.
        config_params: older name of `config`.
        mesh_param: `mesh` of `shardwise.initialize`.
        distributed_port: port of the rendezvous if no launcher has set one.
        dist_init_required: False: use the existing process group. None or True: create it if missing.

    Raises:
        LaunchError: `dist_init_required` is False, and no process group exists.
        UsageError: Accelerate calls, and its number of processes is not the number of ranks.
        ConflictError: Accelerate calls, and its tensor-parallel size is not the engine's.
    """
    of_accelerate = _uses_deepspeed()
    if of_accelerate:
        setup.init_distributed(verbose=False)
        _compare_counts()
        if isinstance(config_params, MutableMapping):  # only Accelerate uses this name
            size = _share_tensor_size(config_params)
            _compare_tensors(config_params, model, size)
            config_params = _with_batch_of(config_params, size)
            optimizer = _own_optimizer(optimizer)
    source = accept(config_source(args, config, config_params))
    check_model(model)
    setup.init_distributed(distributed_port=distributed_port, verbose=False, dist_init_required=dist_init_required)
    parts = build(
        EngineArguments(
            cast(nn.Module, model),
            source,
            optimizer,
            model_parameters,
            lr_scheduler,
            training_data,
            collate_fn,
            loss_fn,
            mesh_param,
            mpu,
            device_index=getattr(args, "device_rank", None),
            engine=DeepSpeedEngine,
            pipeline_engine=PipelineEngine,
        )
    )
    engine = parts[0]
    if of_accelerate:
        _warn_of_saving(engine)
    _patch_lightning_save(engine.module)
    attributes.attach()
    attributes.note(engine)
    groups.note(engine)
    return cast("tuple[DeepSpeedEngine, Any, EngineDataLoader | None, Any]", parts)


def _share_tensor_size(config: MutableMapping[str, Any]) -> int:
    """Return the tensor-parallel size of Accelerate, after writing it where the engine reads it."""
    section = config.get("tensor_parallel")
    size = section.get("autotp_size") if isinstance(section, MutableMapping) else None
    size = size if isinstance(size, int) and size > 1 else 1
    own = getattr(_state("AcceleratorState").get("parallelism_config"), "tp_size", None) or 1
    if own > 1 and size > 1 and own != size:
        raise ConflictError(f"ParallelismConfig(tp_size={own}), but {_TENSOR} is {size}; remove one of them")
    if own > size:
        config["tensor_parallel"] = {**(section or {}), "autotp_size": own}
    return max(own, size)


def _compare_tensors(config: MutableMapping[str, Any], model: Any, size: int) -> None:
    section = {"train_micro_batch_size_per_gpu": 1, "tensor_parallel": config.get("tensor_parallel", {})}
    found = resolve(accept(section), world_size=dist.get_world_size()).config.tensor_parallel.size
    if isinstance(model, nn.Module) and found == 1:
        group = divided_over(model)
        found = len(line_of(model) or [0]) if group is None else group.size
    if found != size:
        raise ConflictError(
            f"Accelerate counts {size} rank{'s' if size != 1 else ''} to a copy of the model, and the model is divided "
            f"over {found}: ranks would get the wrong samples. Write {_TENSOR}: {found} in the configuration, which is "
            "the only form that Accelerate and the Trainer read"
        )


def _with_batch_of(config: MutableMapping[str, Any], tensor: int) -> MutableMapping[str, Any]:
    """Return a configuration with the batch size of data-parallel ranks, if it was computed from all ranks."""
    names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    sizes = [config.get(name) for name in names]
    if tensor == 1 or not all(isinstance(size, int) for size in sizes):
        return config
    micro, steps, whole = cast("list[int]", sizes)
    ranks = dist.get_world_size()
    if whole != micro * steps * ranks or ranks % tensor:
        return config
    return {**config, names[-1]: whole // tensor}


def _own_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside of Accelerate's wrapper, which `ParallelismConfig(tp_size=...)` applies too early."""
    kind = getattr(sys.modules.get("accelerate.optimizer"), "AcceleratedOptimizer", None)
    return optimizer.optimizer if kind is not None and isinstance(optimizer, kind) else optimizer


def _patch_lightning_save(module: Any) -> None:
    """Make the strategy of Lightning's Trainer, if it calls, take a state dict without copies."""
    kinds = [getattr(sys.modules.get(name), "LightningModule", None) for name in _LIGHTNING]
    if not any(kind is not None and isinstance(module, kind) for kind in kinds):
        return
    with contextlib.suppress(AttributeError, RuntimeError):  # without a Trainer
        strategy = module.trainer.strategy
        if hasattr(strategy, "lightning_module_state_dict"):
            strategy.lightning_module_state_dict = functools.partial(_state_dict, module)


def _state_dict(module: nn.Module) -> dict[str, Any]:
    found = module.state_dict(keep_vars=True)
    return {
        name: value.detach() if isinstance(value, torch.Tensor) and not released.is_released(value) else value
        for name, value in found.items()
    }


def _set_backend() -> None:
    """Set a missing backend of a PartialState under construction that has not counted the processes yet."""
    state = _state("PartialState")
    if "backend" in state and state["backend"] is None and "num_processes" not in state and "LOCAL_RANK" in os.environ:
        state["backend"] = dist.get_backend()


def _state(name: str) -> dict[str, Any]:
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
    divided = made.get_tensor_parallel_world_size() > 1
    if not divided and made.zero_optimization_stage() < 3:
        return
    if made.zero_gather_16bit_weights_on_model_save() or made.optimizer is None:
        return
    if dist.get_rank() == 0:
        where = "with tensor parallelism" if divided else "at stage 3"
        warn_once(
            f"zero_optimization.{_GATHER} is not true: {where} Accelerate's get_state_dict and save_model will "
            "raise an error, and the Trainer's save_model will write a checkpoint instead of weights that plain "
            "transformers reads. "
            f'Set "{_GATHER}": true, or zero3_save_16bit_model: true in a file or plugin of Accelerate'
        )
