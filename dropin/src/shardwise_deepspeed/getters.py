"""Engine methods that each return one configuration value, under the names that existing scripts call.

New code reads `config.zero_optimization` and so on. Values of the running engine are in `state_getters`.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from shardwise.precision.autocast import autocast_dtype
from shardwise.precision.dtypes import parse_dtype, policy_from_config
from shardwise.zero.units.plan import TABLE

if TYPE_CHECKING:
    from shardwise.config import Config

GETTERS: list[str] = []
"""Names of the methods of `ConfigGetters`."""

_ZERO = "zero_optimization."


def _data_types(config: Config) -> tuple[torch.dtype, torch.dtype]:
    """(dtype of the parameters, dtype of the gradient accumulator)."""
    policy = policy_from_config(config)
    return policy.compute_dtype or torch.float32, policy.accumulate_dtype


def _autocast_dtype(config: Config) -> torch.dtype | None:
    """The dtype of torch_autocast, whether or not it is on; None if it is off and has none."""
    name = config.torch_autocast.dtype
    return autocast_dtype(config) if name is None else parse_dtype(name, "torch_autocast.dtype")


def _loss_scale_args(config: Config) -> dict[str, Any] | None:
    """Settings of the dynamic loss scale, None if the scale is static or disabled."""
    if not config.fp16.enabled or config.fp16.loss_scale:
        return None
    return {
        "init_scale": 2**config.fp16.initial_scale_power,
        "scale_window": config.fp16.loss_scale_window,
        "delayed_shift": config.fp16.hysteresis,
        "consecutive_hysteresis": config.fp16.consecutive_hysteresis,
        "min_scale": config.fp16.min_loss_scale,
    }


def _optimizer_device(config: Config) -> str:
    found = config.zero_optimization.offload_optimizer
    return "none" if found is None else str(found.device)


def _offloads_to_disk(config: Config) -> bool:
    """Whether parameters or optimizer state are offloaded to disk."""
    zero = config.zero_optimization
    return "nvme" in {section.device for section in (zero.offload_param, zero.offload_optimizer) if section is not None}


def _offload(name: str, default: Any) -> Callable[[Config], Any]:
    def read(config: Config) -> Any:
        found = config.zero_optimization.offload_optimizer
        return default if found is None else getattr(found, name)

    return read


def _shards(what: str) -> Callable[[Config], bool]:
    return lambda config: bool(getattr(TABLE[config.zero_optimization.stage], what))


def _pass(name: str) -> Callable[[Config], bool]:
    return lambda config: name in (config.compile.passes or ())


class _Getter:
    """Adds a method to a class under each name to which it is assigned.
    With a prefix, `read` is the beginning of a path, and the name without the prefix is its end.
    """

    def __init__(self, read: str | Callable[[Config], Any], prefix: str | None = None) -> None:
        self._read = read
        self._prefix = prefix

    def __set_name__(self, owner: type, name: str) -> None:
        path = self._read if self._prefix is None else f"{self._read}{name.removeprefix(self._prefix)}"
        read: Callable[[Any], Any]
        if isinstance(path, str):
            read, what = attrgetter(path), f"`{path}` of the configuration"
        else:
            read, what = path, path.__doc__ or f"the configuration's value of {name.replace('_', ' ')}"

        def method(engine: Any) -> Any:
            return read(engine._resolution.config)

        method.__doc__ = f"Return {what[0].lower() + what[1:].rstrip('.')}."
        method.__name__, method.__qualname__ = name, f"{owner.__name__}.{name}"
        setattr(owner, name, method)
        GETTERS.append(name)


def _value(read: str | Callable[[Config], Any]) -> Any:
    """Return the getter of a key (dotted path), or of a function of the configuration."""
    return _Getter(read)


def _keys(section: str, prefix: str = "") -> Any:
    """Return the getter of the keys of a section (dotted path, ending in a dot) with the methods' names."""
    return _Getter(section, prefix)


class ConfigGetters:
    """One method for each name of `GETTERS`; subclasses have a `Resolution` as `_resolution`.

    >>> from shardwise.config import resolve
    >>> class Reader(ConfigGetters):
    ...     def __init__(self, resolution): self._resolution = resolution
    >>> Reader(resolve({"train_batch_size": 8, "zero_optimization": {"stage": 2}})).zero_optimization_stage()
    2
    """

    # batch and loop
    managed_gradient_accumulation = dataloader_drop_last = steps_per_print = _keys("")
    # optimizer and schedule
    optimizer_name = _value("optimizer.type")
    optimizer_params = _value(lambda config: config.optimizer.params or None)
    optimizer_legacy_fusion = _value("optimizer.legacy_fusion")
    scheduler_name = _value("scheduler.type")
    scheduler_params = _value(lambda config: config.scheduler.params or None)
    gradient_clipping = _keys("")
    # precision
    fp16_enabled = fp16_auto_cast = _keys("fp16.", "fp16_")
    fp16_master_weights_and_gradients = _value("fp16.fp16_master_weights_and_grads")
    bfloat16_enabled = _value("bf16.enabled")
    bf16_master_weights_and_gradients = _value("bf16.bf16_master_weights_and_grads")
    bf16_optimizer_states = _keys("bf16.")
    loss_scale = _keys("fp16.")
    dynamic_loss_scale = _value(lambda config: config.fp16.loss_scale == 0)
    initial_dynamic_scale = _value(lambda config: 2**config.fp16.initial_scale_power)
    dynamic_loss_scale_args = _value(_loss_scale_args)
    amp_enabled = _keys("amp.", "amp_")
    amp_params = _value(lambda config: dict(config.amp.model_extra or {}))
    torch_autocast_enabled = torch_autocast_lower_precision_safe_modules = _keys("torch_autocast.", "torch_autocast_")
    torch_autocast_dtype = _value(_autocast_dtype)
    get_data_types = _value(_data_types)
    # communication
    postscale_gradients = _value(lambda config: not config.prescale_gradients)
    gradient_predivide_factor = graph_harvesting = _keys("")
    sparse_gradients_enabled = _value("sparse_gradients")
    # sharding
    zero_optimization = _value(_shards("optimizer"))
    zero_optimization_partition_gradients = _value(_shards("gradients"))
    zero_optimization_partition_weights = _value(_shards("parameters"))
    zero_optimization_stage = _value("zero_optimization.stage")
    zero_allow_untested_optimizer = zero_force_ds_cpu_optimizer = _keys("")
    zero_reduce_scatter = zero_overlap_comm = zero_sub_group_size = zero_reduce_bucket_size = _keys(_ZERO, "zero_")
    zero_allgather_bucket_size = zero_allgather_partitions = zero_contiguous_gradients = _keys(_ZERO, "zero_")
    zero_load_from_fp32_weights = zero_elastic_checkpoint = zero_grad_hooks = zero_legacy_stage1 = _keys(_ZERO, "zero_")
    zero_ignore_unused_parameters = zero_save_muon_momentum_buffer_in_memory = _keys(_ZERO, "zero_")
    zero_round_robin_gradients = zero_log_trace_cache_warnings = zero_compute_grad_norm = _keys(_ZERO, "zero_")
    zero_parameter_alignment = zero_offload_optimizer = zero_offload_param = _keys(_ZERO, "zero_")
    zero_max_live_parameters = zero_max_reuse_distance = zero_prefetch_bucket_size = _keys(_ZERO + "stage3_", "zero_")
    zero_module_granularity_threshold = zero_param_persistence_threshold = _keys(_ZERO + "stage3_", "zero_")
    zero_model_persistence_threshold = zero_gather_16bit_weights_on_model_save = _keys(_ZERO + "stage3_", "zero_")
    zero_allgather_sequential = _keys(_ZERO + "stage3_", "zero_")
    zero_hpz_partition_size = zero_quantized_weights = zero_quantized_nontrainable_weights = _keys(_ZERO)
    zero_quantized_gradients = zeropp_loco_param = mics_shard_size = _keys(_ZERO)
    zero_multi_rank_bucket_allreduce = _value("zero_optimization.use_multi_rank_bucket_allreduce")
    is_sanity_checks_enabled = _value("zero_optimization.enable_sanity_checks")
    # offload
    zero_use_cpu_optimizer = _value(lambda config: _optimizer_device(config) in ("cpu", "nvme"))
    zero_cpu_offload = _value(lambda config: _optimizer_device(config) == "cpu")
    zero_nvme_offload_optimizer = _value(lambda config: _optimizer_device(config) == "nvme")
    zero_has_nvme_offload = _value(_offloads_to_disk)
    zero_partial_offload = _value(_offload("ratio", 1.0))
    super_offload = _value(_offload("super_offload", False))
    cpuadam_cores_perc = _value(_offload("cpuadam_cores_perc", 0.8))
    zenflow_config = _value("zero_optimization.zenflow")
    swap_tensor_config = aio_config = _value("aio")
    # other parallelism
    tensor_parallel_config = _value("tensor_parallel")
    autotp_size = _keys("tensor_parallel.")
    compile_autosp = _value(_pass("autosp"))
    compile_autotp = _value(_pass("autotp"))
    # checkpoint
    use_node_local_storage = _keys("checkpoint.")
    load_universal_checkpoint = _value("checkpoint.load_universal")
    checkpoint_serialization_enabled = _value("checkpoint.checkpoint_serialization")
    checkpoint_writer_enabled = _value(lambda config: config.checkpoint.writer is not None)
    checkpoint_tag_validation_enabled = _value(lambda config: config.checkpoint.tag_validation != "ignore")
    checkpoint_tag_validation_fail = _value(lambda config: config.checkpoint.tag_validation == "fail")
    # profiling
    wall_clock_breakdown = _value(lambda config: config.wall_clock_breakdown or config.flops_profiler.enabled)
    memory_breakdown = log_level = _keys("")
    flops_profiler_enabled = flops_profiler_recompute_fwd_factor = _keys("flops_profiler.", "flops_profiler_")
    flops_profiler_profile_step = flops_profiler_module_depth = _keys("flops_profiler.", "flops_profiler_")
    flops_profiler_top_modules = flops_profiler_detailed = _keys("flops_profiler.", "flops_profiler_")
    flops_profiler_output_file = _keys("flops_profiler.", "flops_profiler_")
    # autotuning
    autotuning_enabled = autotuning_start_profile_step = _keys("autotuning.", "autotuning_")
    autotuning_end_profile_step = autotuning_metric_path = _keys("autotuning.", "autotuning_")
    autotuning_model_info_path = autotuning_metric = _keys("autotuning.", "autotuning_")
    autotuning_profile_model_info = _value("autotuning.model_info.profile")
    # data
    data_efficiency_enabled = _value("data_efficiency.enabled")
    data_efficiency_config = _value("data_efficiency")
    data_sampling_enabled = _value("data_efficiency.data_sampling.enabled")
    data_sampling_config = _value("data_efficiency.data_sampling")
    curriculum_learning_enabled = _value("data_efficiency.data_sampling.curriculum_learning.enabled")
    curriculum_learning_config = _value("data_efficiency.data_sampling.curriculum_learning")
    random_ltd_enabled = _value("data_efficiency.data_routing.random_ltd.enabled")
    random_ltd_config = _value("data_efficiency.data_routing.random_ltd")
    curriculum_enabled_legacy = _value("curriculum_learning.enabled")
    curriculum_params_legacy = _value("curriculum_learning")
    pld_enabled = pld_theta = pld_gamma = _keys("progressive_layer_drop.", "pld_")
    pld_params = _value("progressive_layer_drop")
    quantize_training = _keys("")
    eigenvalue_enabled = eigenvalue_verbose = _keys("quantize_training.eigenvalue.", "eigenvalue_")
    eigenvalue_max_iter = eigenvalue_tol = eigenvalue_stability = _keys("quantize_training.eigenvalue.", "eigenvalue_")
    eigenvalue_gas_boundary_resolution = eigenvalue_layer_name = _keys("quantize_training.eigenvalue.", "eigenvalue_")
    eigenvalue_layer_num = _keys("quantize_training.eigenvalue.", "eigenvalue_")
    elasticity_enabled = _value("elasticity.enabled")
    is_elastic_model_parallel_supported = _value(
        lambda config: config.elasticity.enabled and config.elasticity.version >= 0.2
    )
