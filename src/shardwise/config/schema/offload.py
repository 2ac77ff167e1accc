"""Offloading: where sharded state and activations live when the device is too small, and how disk is read."""

from __future__ import annotations

from typing import Literal

from .base import ConfigSection, Int, Size, key

_PIN_NOTE = "false in DeepSpeed until 2026-08: without it copies wait for the host"

_SCHEDULED = "buffers follow from the schedule: one piece is used, the next one read, the last one written"

_DEVICE_NOTE = "DeepSpeed's documentation says cpu, its code none"


class OffloadParam(ConfigSection):
    """`zero_optimization.offload_param` (stage 3)."""

    device: Literal["none", "cpu", "nvme"] = key(
        "none",
        "Where parameters live between uses: none (the device), cpu (the host's memory) or nvme (files).",
        default_note=_DEVICE_NOTE,
    )
    nvme_path: str | None = key(None, "Directory on a fast disk, for device nvme.")
    buffer_count: Int = key(5, "Number of buffers between host and disk.", gt=0, no_effect=_SCHEDULED)
    buffer_size: Int = key(100_000_000, "Elements per buffer.", gt=0, no_effect=_SCHEDULED)
    max_in_cpu: Int = key(
        1_000_000_000,
        "Elements of each rank's parameters that stay in host memory when the rest is on disk; in units.",
        ge=0,
    )
    pin_memory: bool = key(True, "Page-lock the host memory (on a CUDA device).", default_note=_PIN_NOTE)


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
    buffer_count: Int = key(4, "Number of buffers between host and disk.", gt=0, no_effect=_SCHEDULED)
    pin_memory: bool = key(
        True, "Page-lock the host memory that gradients are copied to (on a CUDA device).", default_note=_PIN_NOTE
    )
    pipeline_read: bool = key(
        False,
        "Read the next piece from disk while this one is stepped.",
        no_effect="reads always overlap, at no more memory than the schedule has",
    )
    pipeline_write: bool = key(
        False,
        "Write the last piece to disk while this one is stepped.",
        no_effect="writes always overlap, at no more memory than the schedule has",
    )
    fast_init: bool = key(
        False, "Skip writing initial state to disk.", no_effect="what an optimizer has not made yet is not written"
    )
    ratio: float = key(
        1.0,
        "Fraction of the trained parameters whose state is not on the device, in units; below 1 needs stage 3.",
        ge=0,
        le=1,
    )
    super_offload: bool = key(
        False,
        "Step units on the host while the backward pass still runs (SuperOffload).",
    )
    cpuadam_cores_perc: float = key(
        0.8,
        "Fraction of the cores that the host optimizer may use.",
        ge=0,
        le=1,
        no_effect="it uses the threads of the rank (OMP_NUM_THREADS; shardwise run --bind-cores)",
    )


class ActivationOffload(ConfigSection):
    """`activation_offload`: tensors that autograd saves in the engine's forward pass, kept on the host until used."""

    enabled: bool = key(False, "Move saved activations of any model to host memory (without `checkpoint` calls, too).")
    min_bytes: Int = key(
        1_048_576,
        "Memory of at least so many bytes is moved, also by `activation_checkpointing.cpu_checkpointing`.",
        ge=0,
    )


class AIO(ConfigSection):
    """`aio`: asynchronous disk access, used by offloading to disk."""

    block_size: Int = key(4_194_304, "Bytes per request.", gt=0)
    queue_depth: Int = key(8, "Requests in flight, of each of intra_op_parallelism.", gt=0)
    intra_op_parallelism: Int = key(1, "Factor on the requests in flight.", gt=0)
    thread_count: Int | None = key(
        None, "Old name of intra_op_parallelism.", deprecated_for="aio.intra_op_parallelism", gt=0
    )
    single_submit: bool = key(
        False, "Submit requests one by one.", no_effect="every request in flight has a thread of its own"
    )
    overlap_events: bool = key(
        True,
        "Submit new requests while older ones complete.",
        no_effect="every request in flight has a thread of its own",
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
        None,
        "Most bytes of all ranks of a machine in its memory; of CPU ranks without `device` all that they hold.",
    )
    disk: Size | None = key(None, "Most bytes of all ranks that share a disk in their swap files.")
    watchdog: bool | None = key(
        None,
        "End the job with a table before the memory of the machine is used up; null: if state lives in it.",
    )
