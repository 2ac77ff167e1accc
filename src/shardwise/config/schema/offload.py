"""Offloading: where sharded state and activations live when the device is too small, and how disk is read."""

from __future__ import annotations

from typing import Literal

from .base import ConfigSection, Int, key

_PIN_NOTE = (
    "false for years, true in DeepSpeed since 2026-08; page-locked memory is a scarce resource of the machine, "
    "so it is taken only when asked for"
)


class OffloadParam(ConfigSection):
    """`zero_optimization.offload_param` (stage 3)."""

    device: Literal["none", "cpu", "nvme"] = key(
        "none",
        "Where parameters live: none (the device), cpu or nvme.",
        default_note="DeepSpeed's documentation says cpu, its code none",
    )
    nvme_path: str | None = key(None, "Directory on a fast disk, for device nvme.")
    buffer_count: Int = key(5, "Number of buffers between host and disk.", gt=0)
    buffer_size: Int = key(100_000_000, "Elements per buffer.", gt=0)
    max_in_cpu: Int = key(1_000_000_000, "Elements kept in host memory when the rest is on disk.", ge=0)
    pin_memory: bool = key(False, "Page-lock the host memory.", default_note=_PIN_NOTE)


class OffloadOptimizer(ConfigSection):
    """`zero_optimization.offload_optimizer` (stages 1 to 3)."""

    device: Literal["none", "cpu", "nvme"] = key(
        "none",
        "Where optimizer state lives: none (the device), cpu or nvme.",
        default_note="DeepSpeed's documentation says cpu, its code none",
    )
    nvme_path: str | None = key(None, "Directory on a fast disk, for device nvme.")
    buffer_count: Int = key(4, "Number of buffers between host and disk.", gt=0)
    pin_memory: bool = key(False, "Page-lock the host memory.", default_note=_PIN_NOTE)
    pipeline_read: bool = key(False, "Read the next piece from disk while this one is stepped.")
    pipeline_write: bool = key(False, "Write the last piece to disk while this one is stepped.")
    fast_init: bool = key(False, "Skip writing initial state to disk.")
    ratio: float = key(
        1.0, "Fraction of the parameters that is stepped on the host; below 1 needs stage 3.", ge=0, le=1
    )
    super_offload: bool = key(False, "Scheme for tightly coupled CPU and GPU.")
    cpuadam_cores_perc: float = key(0.8, "Fraction of the cores that the host optimizer may use.", ge=0, le=1)


class ZenFlow(ConfigSection):
    """`zero_optimization.zenflow`: step important gradients at once on the device, the rest on the host."""

    topk_ratio: float = key(0.1, "Fraction of gradient columns that count as important.", gt=0, lt=1)
    select_strategy: Literal["auto", "step", "epoch"] = key("auto", "When important columns are selected anew.")
    select_interval: Literal["auto"] | Int = key("auto", "Steps or epochs between selections.")
    update_interval: Literal["auto"] | Int = key("auto", "Steps between host updates.")
    overlap_step: bool = key(False, "Step on the host in another process while the device goes on.")
    offload: bool = key(False, "Offload the state of the selected columns too.")
    auto_ratio: float = key(0.99, "Share of the gradient norm that automatic selection covers.", ge=0, le=1)
    full_warm_up_rounds: Int = key(0, "Steps at the start in which everything is updated.", ge=0)
    pt_reserved_cores_perc: float = key(0.5, "Fraction of the cores left to PyTorch.", ge=0, le=1)
    steps_per_epoch: Int | None = key(None, "Steps in an epoch, for select_strategy epoch.", gt=0)


class ActivationOffload(ConfigSection):
    """`activation_offload`: what autograd saves in the engine's forward pass lives on the host until it is needed."""

    enabled: bool = key(False, "Move saved activations of any model to host memory (without `checkpoint` calls, too).")
    min_bytes: Int = key(
        1_048_576,
        "Memory of at least so many bytes is moved, also by `activation_checkpointing.cpu_checkpointing`.",
        ge=0,
    )


class AIO(ConfigSection):
    """`aio`: asynchronous disk access, used by offloading to disk."""

    block_size: Int = key(1_048_576, "Bytes per request.", gt=0)
    queue_depth: Int = key(8, "Requests in flight.", gt=0)
    intra_op_parallelism: Int = key(1, "Threads per request.", gt=0)
    thread_count: Int | None = key(
        None, "Old name of intra_op_parallelism.", deprecated_for="aio.intra_op_parallelism", gt=0
    )
    single_submit: bool = key(False, "Submit requests one by one.")
    overlap_events: bool = key(True, "Submit new requests while older ones complete.")
    use_gds: bool = key(False, "Move data between disk and GPU directly (GPUDirect Storage).")
