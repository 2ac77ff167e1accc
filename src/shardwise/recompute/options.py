"""What scripts tell activation checkpointing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardwise.comm.api import get_world_size
from shardwise.config import resolve
from shardwise.config.schema.parallel import ActivationCheckpointing
from shardwise.recompute.settings import Settings, let_go, of_script, set_script, unit_of_script

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
    """Take the settings of a script, in place of what it has said before. `checkpoint` works without this call.

    In the forward pass of an engine options are on that the script or the engine's configuration switches on.

    Args:
        mpu_: model-parallel unit; None without model parallelism, or where an engine or `tp_model_init` has the groups.
        deepspeed_config: configuration (dict, path or text) whose section `activation_checkpointing` says the same
            where an argument is None.
        partition_activations: divide saved inputs over the ranks that have a copy of the model among them.
        contiguous_checkpointing: keep memory of the host for saved inputs from pass to pass, with `checkpoint_in_cpu`
            (where it is pinned, it always is). Without that there is nothing to do: the device's allocator uses the
            same memory in each pass.
        num_checkpoints: for how many checkpoints that memory is; it is not needed.
        checkpoint_in_cpu: keep saved inputs of 1 MiB and more (in an engine: `activation_offload.min_bytes`) on the
            host until the backward pass comes near them.
        synchronize: wait for the CUDA device before and after each checkpointed call; nothing on a CPU.
        profile: time the functions; `times` has the result, and an engine logs it each `steps_per_print` steps, or
            else each step.

    Raises:
        ConfigError: the configuration is wrong.
    """
    global _configured
    section = ActivationCheckpointing()
    if deepspeed_config is not None:
        section = resolve(deepspeed_config, world_size=_data_parallel_size(mpu_)).config.activation_checkpointing
    given = {
        "checkpoint_in_cpu": checkpoint_in_cpu,
        "contiguous_checkpointing": contiguous_checkpointing,
        "synchronize": synchronize,
        "profile": profile,
        "partition_activations": partition_activations,
    }
    told = {name: bool(value) for name, value in given.items() if value is not None}
    set_script(replace(Settings.of(section), **told), mpu_)
    _configured = True


def _data_parallel_size(mpu: Any) -> int:
    return get_world_size() if mpu is None else int(mpu.get_data_parallel_world_size())


def is_configured() -> bool:
    """Whether `configure` has been called."""
    return _configured


def reset() -> None:
    """Free what checkpoints without a backward pass have left behind.

    Saved inputs belong to the autograd graph and go with it. What there may be is memory of the host that is kept for
    the next pass. Scripts call this between passes of evaluation.
    """
    let_go()


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Divide saved inputs over the ranks that have a copy of the model among them from now on, or not."""
    set_script(replace(of_script(), partition_activations=bool(partition_activation)), unit_of_script())
