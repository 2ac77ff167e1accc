"""Script options of activation checkpointing: `deepspeed.checkpointing`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardwise.config import accept, resolve
from shardwise.config.schema.parallel import ActivationCheckpointing
from shardwise.recompute.checkpoint import checkpoint
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
    """Set a script's options, replacing earlier ones. `checkpoint` works without this call.

    In an engine's forward pass an option is on if the script or the engine's configuration enables it.

    Args:
        mpu_: model-parallel unit; None without model parallelism, or if an engine or `tp_model_init` has the groups.
        deepspeed_config: configuration (dict, path or text); its section `activation_checkpointing` supplies arguments
            that are None.
        partition_activations: partition saved inputs over the tensor-parallel group.
        contiguous_checkpointing: with `checkpoint_in_cpu`, keep host buffers of saved inputs from pass to pass (pinned
            buffers are always kept). Otherwise no effect: the device's allocator reuses memory anyway.
        num_checkpoints: number of checkpoints in these buffers; not needed.
        checkpoint_in_cpu: offload saved inputs of 1 MiB and more (in an engine: `activation_offload.min_bytes`) to the
            host until the backward pass prefetches them.
        synchronize: wait for the CUDA device before and after each checkpointed call; no effect on a CPU.
        profile: time the functions; `times` returns the result, and an engine logs it each `steps_per_print` steps, or
            else each step.

    Raises:
        ConfigError: the configuration is invalid.
    """
    global _configured
    section = ActivationCheckpointing()
    if deepspeed_config is not None:
        written = accept(deepspeed_config).data.get("activation_checkpointing") or {}
        minimal = {"activation_checkpointing": written, "train_micro_batch_size_per_gpu": 1}
        section = resolve(minimal).config.activation_checkpointing
    given: dict[str, Any] = {
        "checkpoint_in_cpu": checkpoint_in_cpu,
        "contiguous_checkpointing": contiguous_checkpointing,
        "synchronize": synchronize,
        "profile": profile,
        "partition_activations": partition_activations,
    }
    flags: dict[str, Any] = {name: bool(value) for name, value in given.items() if value is not None}
    set_script(replace(Settings.of(section), **flags), mpu_)
    _configured = True


def is_configured() -> bool:
    """Return True if `configure` has been called."""
    return _configured


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Enable or disable the partitioning of saved inputs over the tensor-parallel group."""
    set_script(replace(of_script(), partition_activations=bool(partition_activation)), unit_of_script())


reset = let_go
non_reentrant_checkpoint = checkpoint  # which is always non-reentrant
