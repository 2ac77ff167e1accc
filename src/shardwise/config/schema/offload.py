"""Offloading: where sharded state and activations live when the device is too small, and how disk is read."""

from __future__ import annotations

from typing import Literal

from .base import ConfigSection, Int, Size, key
from .tables import with_unused_keys

_PIN_NOTE = "false in DeepSpeed until 2026-08: without it copies wait for the host"

_DEVICE_NOTE = "DeepSpeed's documentation says cpu, its code none"


@with_unused_keys
class OffloadParam(ConfigSection):
    """`zero_optimization.offload_param` (stage 3)."""

    device: Literal["none", "cpu", "nvme"] = key(
        "none",
        "Where parameters live between uses: none (the device), cpu (the host's memory) or nvme (files).",
        default_note=_DEVICE_NOTE,
    )
    nvme_path: str | None = key(None, "Directory on a fast disk, for device nvme.")
    max_in_cpu: Int = key(
        1_000_000_000,
        "Elements of each rank's parameters that stay in host memory when the rest is on disk; in units.",
        ge=0,
    )
    pin_memory: bool = key(True, "Page-lock the host memory (on a CUDA device).", default_note=_PIN_NOTE)


@with_unused_keys
class OffloadOptimizer(ConfigSection):
    """`zero_optimization.offload_optimizer` (stages 1 to 3)."""

    device: Literal["none", "cpu", "nvme"] = key(
        "none",
        "Where optimizer state and master weights live: none (the device), cpu (the host's memory) or nvme (files). "
        "Unless it is none, the processor steps them, and gradients wait for that outside of the device, too.",
        default_note=_DEVICE_NOTE,
    )
    nvme_path: str | None = key(None, "Directory on a fast disk, for device nvme.")
    gradients: Literal["cpu", "nvme"] | None = key(
        None,
        "Where gradients wait for the step while `device` is not none; null: in the host's memory. With nvme they are "
        "in `nvme_path` and travel three times a step. A key of this library.",
    )
    pin_memory: bool = key(
        True, "Page-lock the host memory that gradients are copied to (on a CUDA device).", default_note=_PIN_NOTE
    )
    ratio: float = key(
        1.0,
        "Fraction of the trained parameters whose state is not on the device, in units; below 1 needs stage 3.",
        ge=0,
        le=1,
    )
    super_offload: bool = key(False, "Step units on the host while the backward pass still runs (SuperOffload).")


class ActivationOffload(ConfigSection):
    """`activation_offload`: tensors that autograd saves in the engine's forward pass, kept on the host until used."""

    enabled: bool = key(False, "Move saved activations of any model to host memory (without `checkpoint` calls, too).")
    min_bytes: Int = key(
        1_048_576,
        "Memory of at least so many bytes is moved, also by `activation_checkpointing.cpu_checkpointing`.",
        ge=0,
    )


@with_unused_keys
class AIO(ConfigSection):
    """`aio`: asynchronous disk access, used by offloading to disk."""

    block_size: Int = key(4_194_304, "Bytes per request.", gt=0)
    queue_depth: Int = key(8, "Requests in flight, of each of intra_op_parallelism.", gt=0)
    intra_op_parallelism: Int = key(1, "Factor on the requests in flight.", gt=0)
    thread_count: Int | None = key(
        None, "Old name of intra_op_parallelism.", deprecated_for="aio.intra_op_parallelism", gt=0
    )
    use_gds: bool = key(False, "Move data between disk and GPU directly (GPUDirect Storage).")


class MemoryLimits(ConfigSection):
    """`memory_limits`: most memory of each tier, below the system's own limits. Not a section of DeepSpeed."""

    device: Size | None = key(
        None,
        "Most bytes of a rank on its device, as the library counts them: refused if planned, an error if exceeded. "
        "`shardwise run --device-limit` overrules it.",
    )
    host: Size | None = key(
        None, "Most bytes of all ranks of a machine in its memory; of CPU ranks without `device` all that they hold."
    )
    disk: Size | None = key(None, "Most bytes of all ranks that share a disk in their swap files.")
    watchdog: bool | None = key(
        None, "End the job with a table before the memory of the machine is used up; null: if state lives in it."
    )
