"""What this version does not have: one table of keys whose features are still to be built.

A configuration is refused only if it asks for such a feature. A section that is present but switched off, or
holds only defaults, is accepted. A later version that builds a feature removes its line here and changes
nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shardwise.errors import NotBuiltError

from .problems import Problem, dotted
from .scan import Scan
from .schema.root import Config


@dataclass(frozen=True)
class Unbuilt:
    """One feature: the key that asks for it, what it is, and when a value asks for it."""

    path: str
    feature: str
    asks: Callable[[Any], bool]


def _on(value: Any) -> bool:
    return value is True


def _off(value: Any) -> bool:
    return value is False


def _given(value: Any) -> bool:
    return value is not None


def _above_one(value: Any) -> bool:
    return isinstance(value, int) and value > 1


def _above_zero(value: Any) -> bool:
    return isinstance(value, int) and value > 0


def _moved(value: Any) -> bool:
    return value is not None and value.device != "none"


def _split(value: Any) -> bool:
    sizes = (value.autotp_size, value.tp.tp_size if value.tp is not None else 1)
    return value.enabled is not False and max(sizes) > 1


def _set(value: Any) -> bool:
    """Whether any key of the section differs from its default."""
    return bool(value.model_dump(exclude_defaults=True))


_COMPRESSION = (
    "weight_quantization",
    "activation_quantization",
    "sparse_pruning",
    "row_pruning",
    "head_pruning",
    "channel_pruning",
)

UNBUILT: tuple[Unbuilt, ...] = (
    Unbuilt("sequence_parallel_size", "sequence parallelism", _above_one),
    Unbuilt("use_data_before_expert_parallelism", "expert parallelism", _on),
    Unbuilt("disable_python_gc", "control of garbage collection", _on),
    Unbuilt("graph_harvesting", "CUDA graphs of optimizer kernels", _on),
    Unbuilt("amp.enabled", "Apex AMP, which torch has replaced (use bf16, fp16 or torch_autocast)", _on),
    Unbuilt("msamp.enabled", "MS-AMP (use bf16, fp16 or torch_autocast)", _on),
    Unbuilt("zero_optimization.offload_param", "parameter offload", _moved),
    Unbuilt("zero_optimization.offload_optimizer", "optimizer offload", _moved),
    Unbuilt("zero_optimization.zenflow", "ZenFlow", _given),
    Unbuilt("zero_optimization.zero_quantized_nontrainable_weights", "frozen weights stored as integers", _on),
    Unbuilt("zero_optimization.mics_shard_size", "sharding within groups of ranks", _above_zero),
    Unbuilt("zero_optimization.mics_hierarchical_params_gather", "sharding within groups of ranks", _on),
    Unbuilt("zero_optimization.override_module_apply", "zero.Init without Module.apply", _off),
    Unbuilt("zero_optimization.enable_sanity_checks", "per-step consistency checks", _on),
    Unbuilt("activation_checkpointing.partition_activations", "saved inputs split over tensor-parallel ranks", _on),
    Unbuilt("activation_checkpointing.contiguous_memory_optimization", "saved inputs in one buffer", _on),
    Unbuilt("activation_checkpointing.cpu_checkpointing", "saved inputs in host memory", _on),
    Unbuilt("activation_checkpointing.synchronize_checkpoint_boundary", "synchronization at every checkpoint", _on),
    Unbuilt("activation_checkpointing.profile", "timing of checkpointed functions", _on),
    Unbuilt("sparse_attention", "sparse attention", _given),
    Unbuilt("pipeline.enabled", "pipeline parallelism", _on),
    Unbuilt("pipeline.stages", "pipeline parallelism", _above_one),
    Unbuilt("pipeline.activation_checkpoint_interval", "pipeline parallelism", _above_zero),
    Unbuilt("tensor_parallel", "tensor parallelism", _split),
    Unbuilt("expert_parallel.enabled", "expert parallelism", _on),
    Unbuilt("wall_clock_breakdown", "timing of phases", _on),
    Unbuilt("memory_breakdown", "memory of phases", _on),
    Unbuilt("dump_state", "printing the engine's state", _on),
    Unbuilt("log_level", "setting the log level by configuration", _given),
    Unbuilt("timers", "settings of the throughput timer", _set),
    Unbuilt("flops_profiler.enabled", "the FLOPs profiler", _on),
    Unbuilt("tensorboard.enabled", "TensorBoard", _on),
    Unbuilt("wandb.enabled", "Weights & Biases", _on),
    Unbuilt("csv_monitor.enabled", "CSV monitoring", _on),
    Unbuilt("comet.enabled", "Comet", _on),
    Unbuilt("checkpoint.load_universal", "the universal checkpoint format", _on),
    Unbuilt("checkpoint.use_node_local_storage", "node-local checkpoints", _on),
    Unbuilt("nebula.enabled", "Nebula (for asynchronous saves set checkpoint.async_save)", _on),
    Unbuilt("datastates_ckpt", "DataStates (for asynchronous saves set checkpoint.async_save)", _given),
    Unbuilt("data_efficiency.enabled", "data efficiency", _on),
    Unbuilt("curriculum_learning.enabled", "curriculum learning", _on),
    Unbuilt("progressive_layer_drop.enabled", "progressive layer dropping", _on),
    *(
        Unbuilt(f"compression_training.{name}.shared_parameters.enabled", "model compression", _on)
        for name in _COMPRESSION
    ),
    Unbuilt("compression_training.layer_reduction.enabled", "layer reduction", _on),
    Unbuilt("weight_quantization", "quantized weights", lambda value: value is not None and value.enabled),
    Unbuilt("quantize_training.enabled", "quantization in training", _on),
    Unbuilt("quantize_training.eigenvalue.enabled", "eigenvalue estimation", _on),
    Unbuilt("eigenvalue.enabled", "eigenvalue estimation", _on),
    Unbuilt("elasticity.enabled", "elastic batch sizes", _on),
    Unbuilt("autotuning.enabled", "autotuning", _on),
    Unbuilt("autotuning.model_info.profile", "autotuning", _on),
    Unbuilt("hybrid_engine.enabled", "the hybrid engine", _on),
    Unbuilt("compile", "compiler passes", _set),
)


def value_at(config: Config, path: str) -> Any:
    """The value at a dotted path, None where a section on the way is absent."""
    place: Any = config
    for name in path.split("."):
        place = getattr(place, name) if place is not None else None
    return place


def check_built(config: Config, found: Scan) -> list[Problem]:
    """Return one problem for each requested feature that this version does not have."""
    problems = []
    for entry in UNBUILT:
        if entry.asks(value_at(config, entry.path)):
            message = f"this version does not have {entry.feature}; remove the key or switch it off"
            problems.append(Problem(_as_written(entry.path, found), message, NotBuiltError))
    return problems


def _as_written(path: str, found: Scan) -> str:
    """The user's spelling of a key, or of the first key below it (a deprecated key may stand for a section)."""
    parts = tuple(path.split("."))
    below = (written for given, written in found.given.items() if given[: len(parts)] == parts)
    return dotted(found.given.get(parts) or next(below, parts))
