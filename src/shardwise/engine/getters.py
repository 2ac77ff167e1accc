"""Engine methods that each return one configuration value, under the names that existing scripts call (`GETTERS`).

New code reads `config.zero_optimization` and so on. Values of the running engine are in `state_getters`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch

from shardwise.precision.autocast import autocast_dtype
from shardwise.precision.dtypes import parse_dtype, policy_from_config
from shardwise.zero.units.plan import TABLE

if TYPE_CHECKING:
    from shardwise.config import Config

Read = str | Callable[["Config"], Any]
"""Dotted path of a key, or a function of the configuration."""


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


def _offload_device(section: str) -> Callable[[Config], str]:
    def read(config: Config) -> str:
        found = getattr(config.zero_optimization, section)
        return "none" if found is None else str(found.device)

    return read


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


def _nonempty(value: Any) -> Any:
    return value or None


_zero_optimizer_device = _offload_device("offload_optimizer")

GETTERS: dict[str, Read] = {
    # batch and loop
    "managed_gradient_accumulation": "managed_gradient_accumulation",
    "dataloader_drop_last": "dataloader_drop_last",
    "steps_per_print": "steps_per_print",
    # optimizer and schedule
    "optimizer_name": "optimizer.type",
    "optimizer_params": lambda config: _nonempty(config.optimizer.params),
    "optimizer_legacy_fusion": "optimizer.legacy_fusion",
    "scheduler_name": "scheduler.type",
    "scheduler_params": lambda config: _nonempty(config.scheduler.params),
    "gradient_clipping": "gradient_clipping",
    # precision
    "fp16_enabled": "fp16.enabled",
    "bfloat16_enabled": "bf16.enabled",
    "fp16_auto_cast": "fp16.auto_cast",
    "fp16_master_weights_and_gradients": "fp16.fp16_master_weights_and_grads",
    "bf16_master_weights_and_gradients": "bf16.bf16_master_weights_and_grads",
    "bf16_optimizer_states": "bf16.bf16_optimizer_states",
    "loss_scale": "fp16.loss_scale",
    "dynamic_loss_scale": lambda config: config.fp16.loss_scale == 0,
    "initial_dynamic_scale": lambda config: 2**config.fp16.initial_scale_power,
    "dynamic_loss_scale_args": _loss_scale_args,
    "amp_enabled": "amp.enabled",
    "amp_params": lambda config: dict(config.amp.model_extra or {}),
    "torch_autocast_enabled": "torch_autocast.enabled",
    "torch_autocast_dtype": _autocast_dtype,
    "torch_autocast_lower_precision_safe_modules": "torch_autocast.lower_precision_safe_modules",
    "get_data_types": _data_types,
    # communication
    "postscale_gradients": lambda config: not config.prescale_gradients,
    "gradient_predivide_factor": "gradient_predivide_factor",
    "sparse_gradients_enabled": "sparse_gradients",
    "graph_harvesting": "graph_harvesting",
    # sharding
    "zero_optimization": _shards("optimizer"),
    "zero_optimization_stage": "zero_optimization.stage",
    "zero_optimization_partition_gradients": _shards("gradients"),
    "zero_optimization_partition_weights": _shards("parameters"),
    "zero_allow_untested_optimizer": "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer": "zero_force_ds_cpu_optimizer",
    "zero_reduce_scatter": "zero_optimization.reduce_scatter",
    "zero_overlap_comm": "zero_optimization.overlap_comm",
    "zero_sub_group_size": "zero_optimization.sub_group_size",
    "zero_reduce_bucket_size": "zero_optimization.reduce_bucket_size",
    "zero_multi_rank_bucket_allreduce": "zero_optimization.use_multi_rank_bucket_allreduce",
    "zero_allgather_bucket_size": "zero_optimization.allgather_bucket_size",
    "zero_allgather_partitions": "zero_optimization.allgather_partitions",
    "zero_contiguous_gradients": "zero_optimization.contiguous_gradients",
    "zero_load_from_fp32_weights": "zero_optimization.load_from_fp32_weights",
    "zero_elastic_checkpoint": "zero_optimization.elastic_checkpoint",
    "zero_max_live_parameters": "zero_optimization.stage3_max_live_parameters",
    "zero_max_reuse_distance": "zero_optimization.stage3_max_reuse_distance",
    "zero_prefetch_bucket_size": "zero_optimization.stage3_prefetch_bucket_size",
    "zero_module_granularity_threshold": "zero_optimization.stage3_module_granularity_threshold",
    "zero_param_persistence_threshold": "zero_optimization.stage3_param_persistence_threshold",
    "zero_model_persistence_threshold": "zero_optimization.stage3_model_persistence_threshold",
    "zero_gather_16bit_weights_on_model_save": ("zero_optimization.stage3_gather_16bit_weights_on_model_save"),
    "zero_allgather_sequential": "zero_optimization.stage3_allgather_sequential",
    "zero_grad_hooks": "zero_optimization.grad_hooks",
    "zero_legacy_stage1": "zero_optimization.legacy_stage1",
    "zero_ignore_unused_parameters": "zero_optimization.ignore_unused_parameters",
    "zero_save_muon_momentum_buffer_in_memory": ("zero_optimization.save_muon_momentum_buffer_in_memory"),
    "zero_round_robin_gradients": "zero_optimization.round_robin_gradients",
    "zero_hpz_partition_size": "zero_optimization.zero_hpz_partition_size",
    "zero_quantized_weights": "zero_optimization.zero_quantized_weights",
    "zero_quantized_nontrainable_weights": "zero_optimization.zero_quantized_nontrainable_weights",
    "zero_quantized_gradients": "zero_optimization.zero_quantized_gradients",
    "zeropp_loco_param": "zero_optimization.zeropp_loco_param",
    "zero_log_trace_cache_warnings": "zero_optimization.log_trace_cache_warnings",
    "is_sanity_checks_enabled": "zero_optimization.enable_sanity_checks",
    "zero_compute_grad_norm": "zero_optimization.compute_grad_norm",
    "zero_parameter_alignment": "zero_optimization.parameter_alignment",
    "mics_shard_size": "zero_optimization.mics_shard_size",
    # offload
    "zero_offload_optimizer": "zero_optimization.offload_optimizer",
    "zero_offload_param": "zero_optimization.offload_param",
    "zero_use_cpu_optimizer": lambda config: _zero_optimizer_device(config) in ("cpu", "nvme"),
    "zero_cpu_offload": lambda config: _zero_optimizer_device(config) == "cpu",
    "zero_nvme_offload_optimizer": lambda config: _zero_optimizer_device(config) == "nvme",
    "zero_has_nvme_offload": _offloads_to_disk,
    "zero_partial_offload": _offload("ratio", 1.0),
    "super_offload": _offload("super_offload", False),
    "cpuadam_cores_perc": _offload("cpuadam_cores_perc", 0.8),
    "zenflow_config": "zero_optimization.zenflow",
    "swap_tensor_config": "aio",
    "aio_config": "aio",
    # other parallelism
    "tensor_parallel_config": "tensor_parallel",
    "autotp_size": "tensor_parallel.autotp_size",
    "compile_autosp": _pass("autosp"),
    "compile_autotp": _pass("autotp"),
    # checkpoint
    "use_node_local_storage": "checkpoint.use_node_local_storage",
    "load_universal_checkpoint": "checkpoint.load_universal",
    "checkpoint_serialization_enabled": "checkpoint.checkpoint_serialization",
    "checkpoint_writer_enabled": lambda config: config.checkpoint.writer is not None,
    "checkpoint_tag_validation_enabled": lambda config: config.checkpoint.tag_validation != "ignore",
    "checkpoint_tag_validation_fail": lambda config: config.checkpoint.tag_validation == "fail",
    # profiling
    "wall_clock_breakdown": lambda config: config.wall_clock_breakdown or config.flops_profiler.enabled,
    "memory_breakdown": "memory_breakdown",
    "flops_profiler_enabled": "flops_profiler.enabled",
    "flops_profiler_recompute_fwd_factor": "flops_profiler.recompute_fwd_factor",
    "flops_profiler_profile_step": "flops_profiler.profile_step",
    "flops_profiler_module_depth": "flops_profiler.module_depth",
    "flops_profiler_top_modules": "flops_profiler.top_modules",
    "flops_profiler_detailed": "flops_profiler.detailed",
    "flops_profiler_output_file": "flops_profiler.output_file",
    "log_level": "log_level",
    # autotuning
    "autotuning_enabled": "autotuning.enabled",
    "autotuning_start_profile_step": "autotuning.start_profile_step",
    "autotuning_end_profile_step": "autotuning.end_profile_step",
    "autotuning_metric_path": "autotuning.metric_path",
    "autotuning_model_info_path": "autotuning.model_info_path",
    "autotuning_metric": "autotuning.metric",
    "autotuning_profile_model_info": "autotuning.model_info.profile",
    # data
    "data_efficiency_enabled": "data_efficiency.enabled",
    "data_efficiency_config": "data_efficiency",
    "data_sampling_enabled": "data_efficiency.data_sampling.enabled",
    "data_sampling_config": "data_efficiency.data_sampling",
    "curriculum_learning_enabled": "data_efficiency.data_sampling.curriculum_learning.enabled",
    "curriculum_learning_config": "data_efficiency.data_sampling.curriculum_learning",
    "random_ltd_enabled": "data_efficiency.data_routing.random_ltd.enabled",
    "random_ltd_config": "data_efficiency.data_routing.random_ltd",
    "curriculum_enabled_legacy": "curriculum_learning.enabled",
    "curriculum_params_legacy": "curriculum_learning",
    "pld_enabled": "progressive_layer_drop.enabled",
    "pld_params": "progressive_layer_drop",
    "pld_theta": "progressive_layer_drop.theta",
    "pld_gamma": "progressive_layer_drop.gamma",
    "quantize_training": "quantize_training",
    "eigenvalue_enabled": "quantize_training.eigenvalue.enabled",
    "eigenvalue_verbose": "quantize_training.eigenvalue.verbose",
    "eigenvalue_max_iter": "quantize_training.eigenvalue.max_iter",
    "eigenvalue_tol": "quantize_training.eigenvalue.tol",
    "eigenvalue_stability": "quantize_training.eigenvalue.stability",
    "eigenvalue_gas_boundary_resolution": "quantize_training.eigenvalue.gas_boundary_resolution",
    "eigenvalue_layer_name": "quantize_training.eigenvalue.layer_name",
    "eigenvalue_layer_num": "quantize_training.eigenvalue.layer_num",
    "elasticity_enabled": "elasticity.enabled",
    "is_elastic_model_parallel_supported": lambda config: (
        config.elasticity.enabled and config.elasticity.version >= 0.2
    ),
}
"""Engine method -> configuration value."""


def _getter(name: str, read: Read) -> Callable[[Any], Any]:
    if callable(read):
        compute = read

        def method(self: Any) -> Any:
            return compute(self._resolution.config)

        what = compute.__doc__ or f"what the configuration says about {name.replace('_', ' ')}"
        method.__doc__ = f"Return {what[0].lower() + what[1:].rstrip('.')}."
    else:
        path = read.split(".")

        def method(self: Any) -> Any:
            value = self._resolution.config
            for part in path:
                value = getattr(value, part)
            return value

        method.__doc__ = f"Return `{read}` of the configuration."
    method.__name__ = name
    method.__qualname__ = f"ConfigGetters.{name}"
    return method


class ConfigGetters:
    """One method for each entry of `GETTERS`; subclasses have a `Resolution` as `_resolution`.

    >>> from shardwise.config import resolve
    >>> class Reader(ConfigGetters):
    ...     def __init__(self, resolution): self._resolution = resolution
    >>> Reader(resolve({"train_batch_size": 8, "zero_optimization": {"stage": 2}})).zero_optimization_stage()
    2
    """

    if TYPE_CHECKING:
        # Type checkers and editors read the names here.
        _ANY = cast(Any, None)
        aio_config = amp_enabled = amp_params = autotp_size = autotuning_enabled = autotuning_end_profile_step = _ANY
        autotuning_metric = autotuning_metric_path = autotuning_model_info_path = _ANY
        autotuning_profile_model_info = autotuning_start_profile_step = bf16_master_weights_and_gradients = _ANY
        bf16_optimizer_states = bfloat16_enabled = checkpoint_serialization_enabled = _ANY
        checkpoint_tag_validation_enabled = checkpoint_tag_validation_fail = checkpoint_writer_enabled = _ANY
        compile_autosp = compile_autotp = cpuadam_cores_perc = curriculum_enabled_legacy = _ANY
        curriculum_learning_config = curriculum_learning_enabled = curriculum_params_legacy = _ANY
        data_efficiency_config = data_efficiency_enabled = data_sampling_config = data_sampling_enabled = _ANY
        dataloader_drop_last = dynamic_loss_scale = dynamic_loss_scale_args = eigenvalue_enabled = _ANY
        eigenvalue_gas_boundary_resolution = eigenvalue_layer_name = eigenvalue_layer_num = _ANY
        eigenvalue_max_iter = eigenvalue_stability = eigenvalue_tol = eigenvalue_verbose = elasticity_enabled = _ANY
        flops_profiler_detailed = flops_profiler_enabled = flops_profiler_module_depth = _ANY
        flops_profiler_output_file = flops_profiler_profile_step = flops_profiler_recompute_fwd_factor = _ANY
        flops_profiler_top_modules = fp16_auto_cast = fp16_enabled = fp16_master_weights_and_gradients = _ANY
        get_data_types = gradient_clipping = gradient_predivide_factor = graph_harvesting = _ANY
        initial_dynamic_scale = is_elastic_model_parallel_supported = is_sanity_checks_enabled = _ANY
        load_universal_checkpoint = log_level = loss_scale = managed_gradient_accumulation = memory_breakdown = _ANY
        mics_shard_size = optimizer_legacy_fusion = optimizer_name = optimizer_params = pld_enabled = _ANY
        pld_gamma = pld_params = pld_theta = postscale_gradients = quantize_training = random_ltd_config = _ANY
        random_ltd_enabled = scheduler_name = scheduler_params = sparse_gradients_enabled = steps_per_print = _ANY
        super_offload = swap_tensor_config = tensor_parallel_config = torch_autocast_dtype = _ANY
        torch_autocast_enabled = torch_autocast_lower_precision_safe_modules = use_node_local_storage = _ANY
        wall_clock_breakdown = zenflow_config = zero_allgather_bucket_size = zero_allgather_partitions = _ANY
        zero_allgather_sequential = zero_allow_untested_optimizer = zero_compute_grad_norm = _ANY
        zero_contiguous_gradients = zero_cpu_offload = zero_elastic_checkpoint = zero_force_ds_cpu_optimizer = _ANY
        zero_gather_16bit_weights_on_model_save = zero_grad_hooks = zero_hpz_partition_size = _ANY
        zero_ignore_unused_parameters = zero_legacy_stage1 = zero_load_from_fp32_weights = _ANY
        zero_log_trace_cache_warnings = zero_max_live_parameters = zero_max_reuse_distance = _ANY
        zero_model_persistence_threshold = zero_module_granularity_threshold = _ANY
        zero_multi_rank_bucket_allreduce = zero_nvme_offload_optimizer = zero_offload_optimizer = _ANY
        zero_offload_param = zero_optimization = zero_optimization_partition_gradients = _ANY
        zero_optimization_partition_weights = zero_optimization_stage = zero_overlap_comm = _ANY
        zero_param_persistence_threshold = zero_parameter_alignment = zero_partial_offload = _ANY
        zero_prefetch_bucket_size = zero_quantized_gradients = zero_quantized_nontrainable_weights = _ANY
        zero_quantized_weights = zero_reduce_bucket_size = zero_reduce_scatter = zero_round_robin_gradients = _ANY
        zero_save_muon_momentum_buffer_in_memory = zero_sub_group_size = zero_use_cpu_optimizer = _ANY
        zeropp_loco_param = _ANY


for _name, _read in GETTERS.items():
    setattr(ConfigGetters, _name, _getter(_name, _read))
