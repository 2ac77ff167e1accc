"""`shardwise.initialize`: the native signature, and its result."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import Dataset

from shardwise.data import EngineDataLoader
from shardwise.engine.build import EngineArguments, build
from shardwise.engine.engine import Engine
from shardwise.errors import UsageError


class Training(NamedTuple):
    """Result of `initialize`."""

    engine: Engine
    optimizer: Any
    """The optimizer that the engine steps; None without one."""
    training_dataloader: EngineDataLoader | None
    """Loader of `training_data`; None without a dataset."""
    lr_scheduler: Any
    """The learning-rate schedule that the engine advances; None without one."""


class ModelParallelUnit(Protocol):
    """Object with the client's process groups (`mpu`); further methods are described at `initialize`."""

    def get_data_parallel_group(self) -> Any:
        """Return the process group of the ranks to shard over."""


Parameters = ParamSpec("Parameters")
Value = TypeVar("Value")

_OF_DEEPSPEED = {
    "args": "config",
    "config_params": "config",
    "mesh_param": "mesh",
    "dist_init_required": "init_distributed()",
    "distributed_port": "init_distributed()",
}
"""Argument of `deepspeed.initialize` -> its native equivalent."""


def _refuses_names_of_deepspeed(function: Callable[Parameters, Value]) -> Callable[Parameters, Value]:
    @functools.wraps(function)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Value:
        for name in kwargs.keys() & _OF_DEEPSPEED.keys():
            raise UsageError(
                f"shardwise.initialize({name}=...): it is an argument of DeepSpeed's signature. Use "
                f"{_OF_DEEPSPEED[name]} instead, or call deepspeed.initialize of the drop-in (pip install ./dropin)"
            )
        return function(*args, **kwargs)

    return call


@_refuses_names_of_deepspeed
def initialize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None = None,
    *,
    config: Mapping[str, Any] | str | os.PathLike[str],
    model_parameters: Iterable[Any] | None = None,
    lr_scheduler: Callable[[torch.optim.Optimizer], Any] | object | None = None,
    training_data: Iterable[Any] | Dataset[Any] | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    loss_fn: Callable[..., Any] | None = None,
    mesh: DeviceMesh | tuple[int, ...] | None = None,
    mpu: ModelParallelUnit | None = None,
    sample_batch: Any = None,
) -> Training:
    """Shard a model for training and return its engine.

    Args:
        model: any `nn.Module`, built plainly, on the meta device, or under `shardwise.zero.Init`. Its parameters keep
            their identity.
        optimizer: an instance (kept; its groups are edited in place), or a callable (such as a class) of the
            parameters. Overrides the `optimizer` section.
        config: dict, path, or base64 or text JSON.
        model_parameters: parameters, (name, parameter) pairs, or parameter groups to optimise; default: all that
            require a gradient.
        lr_scheduler: a scheduler, or a callable of the optimizer. Overrides the `scheduler` section.
        training_data: dataset of the returned dataloader.
        collate_fn: makes a batch from a list of samples.
        loss_fn: makes the model a pipeline of `pipeline.stages` stages; called with its output and the labels.
        mesh: mesh of the ranks to shard over, in one of three forms; a DeviceMesh may have the further dimension
            `pp` of pipeline ranks, outside of the others. (1) A DeviceMesh with a dimension `shard`,
            or with `replicate` and `shard` (HSDP; also the key `zero_optimization.mics_shard_size`). (2) A pair of
            numbers, data-parallel and sequence-parallel ranks, or a mesh with a dimension `sp` (also the key
            `sequence_parallel_size`). (3) A mesh with the last dimension `tp` (also the key
            `tensor_parallel.autotp_size`), optionally after `dp_replicate`, `dp` (or `dp_shard`) and `sp`.
        mpu: model-parallel unit. Its `get_data_parallel_group()` returns the ranks to shard over. A
            `get_sequence_parallel_group()` of several ranks sets the sequence-parallel group; state is then sharded
            over all ranks, or over those of `get_sequence_data_parallel_group()`.
        sample_batch: samples as the model takes them (see `Engine.memory_report`), by which "auto" values are planned
            with activations; default: a sample of `training_data`, if it has a length.

    Returns:
        (engine, optimizer, training dataloader or None, lr scheduler or None), a named tuple.

    Raises:
        ConfigError: the configuration is wrong; the message names every offending key.
        UsageError: arguments contradict each other.

    Example:
        >>> import shardwise, torch
        >>> config = {"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
        >>> engine = shardwise.initialize(torch.nn.Linear(4, 1), config=config).engine
        >>> _ = engine.backward(engine(torch.ones(2, 4)).mean())
        >>> engine.step()
        >>> engine.global_steps
        1
        >>> engine.destroy()
    """
    parts = build(
        EngineArguments(
            model,
            config,
            optimizer,
            model_parameters,
            lr_scheduler,
            training_data,
            collate_fn,
            loss_fn,
            mesh,
            mpu,
            sample_batch,
        )
    )
    return Training(*parts)
