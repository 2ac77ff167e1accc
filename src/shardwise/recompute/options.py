"""What scripts tell activation checkpointing; what this version does not have is refused."""

from __future__ import annotations

from typing import Any

from shardwise.absent import CHECKPOINTING
from shardwise.comm.api import get_world_size
from shardwise.config import resolve
from shardwise.errors import NotBuiltError

_KEYS = {
    "partition_activations": "partition_activations",
    "contiguous_checkpointing": "contiguous_memory_optimization",
    "checkpoint_in_cpu": "cpu_checkpointing",
    "synchronize": "synchronize_checkpoint_boundary",
    "profile": "profile",
}
"""The options' names in the configuration."""

_configured = False


def configure(
    mpu_: Any,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Take the settings of a script. `checkpoint` needs none: it works without this call.

    Args:
        mpu_: model-parallel unit; None without model parallelism.
        deepspeed_config: configuration (dict, path or text) whose section `activation_checkpointing` says the same
            where an argument is None.
        partition_activations: split saved inputs over tensor-parallel ranks. Not in this version.
        contiguous_checkpointing: keep saved inputs in one buffer. Not in this version.
        num_checkpoints: for how many checkpoints that buffer is; it is not needed.
        checkpoint_in_cpu: move saved inputs to the host. Not in this version.
        synchronize: synchronize the device at every checkpoint. Not in this version.
        profile: time the functions. Not in this version.

    Raises:
        NotBuiltError: an option is switched on that this version does not have, or there is model parallelism.
        ConfigError: the configuration is wrong.
    """
    global _configured
    section = None
    if deepspeed_config is not None:
        section = resolve(deepspeed_config, world_size=_data_parallel_size(mpu_)).config.activation_checkpointing
    given = {
        "partition_activations": partition_activations,
        "contiguous_checkpointing": contiguous_checkpointing,
        "checkpoint_in_cpu": checkpoint_in_cpu,
        "synchronize": synchronize,
        "profile": profile,
    }
    for name, value in given.items():
        key = _KEYS[name]
        if value:
            raise NotBuiltError(
                f"checkpointing.configure({name}={value!r}): this version does not have {CHECKPOINTING[key]}; pass "
                "False or leave it out"
            )
        if value is None and section is not None and getattr(section, key):
            raise NotBuiltError(
                f"checkpointing.configure(): activation_checkpointing.{key}: this version does not have "
                f"{CHECKPOINTING[key]}; set it to false or pass {name}=False"
            )
    size = 1 if mpu_ is None else int(mpu_.get_model_parallel_world_size())
    if size > 1:
        raise NotBuiltError(
            f"checkpointing.configure(mpu_=...): its model-parallel size is {size}, and this version does not have "
            "tensor parallelism, whose ranks draw random numbers of their own. Pass None, or a unit of size 1"
        )
    _configured = True


def _data_parallel_size(mpu: Any) -> int:
    return get_world_size() if mpu is None else int(mpu.get_data_parallel_world_size())


def is_configured() -> bool:
    """Whether `configure` has been called."""
    return _configured


def reset() -> None:
    """Free what checkpoints without a backward pass have left behind.

    There is nothing to do: saved inputs belong to the autograd graph and go with it. Scripts call this between passes
    of evaluation.
    """


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Split saved inputs over tensor-parallel ranks from now on, or not.

    Raises:
        NotBuiltError: they are to be split, which this version cannot do.
    """
    if partition_activation:
        raise NotBuiltError(
            f"checkpointing.partition_activations_in_checkpoint({partition_activation!r}): this version does not have "
            f"{CHECKPOINTING['partition_activations']}; pass False or leave the call out"
        )
