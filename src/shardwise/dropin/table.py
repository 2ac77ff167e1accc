"""Every module path and public name of DeepSpeed 0.19, with its entry.

A block per module has names of functions, classes and values under the module of shardwise, with the arguments that
scripts may rely on; other names of modules; stubs, with the reason; and absent names ("*": the whole module), because
scripts test for them by importing. Building a feature moves its names from `stubs` and `missing`.
"""

from __future__ import annotations

from shardwise.absent import (
    AUTOTUNER,
    COMPRESS,
    DATA,
    DUAL_PIPE,
    ELASTIC,
    FILES,
    FPDT,
    HYBRID,
    INFERENCE,
    INNER,
    LAYERS,
    LINEAR,
    MICS,
    OPS,
    PIPELINE,
    SHARED_VOCABULARY,
    SPARSE,
    SWAPPERS,
    TENSOR,
    TILED,
    TUNING,
    UNIVERSAL,
    WRAPPERS,
    WRITERS,
    ZENFLOW,
)
from shardwise.dropin.adapters import checkpoint_keys, config_keys
from shardwise.dropin.entries import Entry, classes, functions, merge, missing, modules, stubs, values
from shardwise.dropin.inner import NAMES as INNER_NAMES

_API = "shardwise.comm.api"
_ADAPT = "shardwise.dropin.adapters"

_INITIALIZE = (
    "(args=None, model=None, optimizer=None, model_parameters=None, training_data=None, lr_scheduler=None, "
    "distributed_port=29500, mpu=None, dist_init_required=None, collate_fn=None, config=None, mesh_param=None, "
    "config_params=None)"
)
_INIT_DISTRIBUTED = (
    "init_distributed(dist_backend=None, auto_mpi_discovery=True, distributed_port=29500, verbose=True, timeout=..., "
    "init_method=None, dist_init_required=None, config=None, rank=-1, world_size=-1)"
)
_LOGGING = merge(
    functions(
        f"{_ADAPT}.logs",
        "log_dist(message, ranks=None, level=20)",
        "log_dist_once",
        "set_log_level_from_string",
    ),
    values(f"{_ADAPT}.logs", "logger"),
)
_ACCELERATOR = functions(f"{_ADAPT}.accelerator", "get_accelerator()")
_ACCELERATOR_CLASS = classes(f"{_ADAPT}.accelerator", "DeepSpeedAccelerator = Accelerator")
_ON_DEVICE = classes(f"{_ADAPT}.building", "OnDevice(dtype, device='meta', enabled=True)")
_LEAVES = functions(
    "shardwise.zero.units.leaves",
    "set_z3_leaf_modules(model, classes_or_names, raise_if_not_found=True)",
    "unset_z3_leaf_modules",
    "get_z3_leaf_modules",
    "set_z3_leaf_module(model, flag)",
    "z3_leaf_module",
    "set_z3_leaf_modules_by_name(model, module_names, flag=True, raise_if_not_found=True)",
    "set_z3_leaf_modules_by_suffix(model, module_suffixes, flag=True, raise_if_not_found=True)",
)
_REPEATING = classes("shardwise.data", "RepeatingLoader(loader)")
_CONFIG = merge(
    classes(f"{_ADAPT}.configuration", "DeepSpeedConfig"),
    classes("shardwise.errors", "DeepSpeedConfigError = ConfigError"),
)
_OPTIMIZER = classes(f"{_ADAPT}.engine_optimizer", "DeepSpeedOptimizer")
_ZERO_OPTIMIZER = stubs("optimizers are not wrapped; see engine.zero_optimization_stage()", "ZeROOptimizer")
_ENGINE = classes("shardwise.engine", "DeepSpeedEngine = Engine")
_LOADER = classes("shardwise.data", "DeepSpeedDataLoader = EngineDataLoader")
_GATHERED = classes("shardwise.zero", "GatheredParameters(params, modifier_rank=None, fwd_module=None, enabled=True)")
_INIT = classes(
    "shardwise.zero",
    "Init(module=None, data_parallel_group=None, mem_efficient_linear=True, remote_device=None, pin_memory=False, "
    "config_dict_or_path=None, config=None, enabled=True, dtype=None, mpu=None, zero_param_parallel_group=None, "
    "zero_quantized_weights=False, zero_quantized_nontrainable_weights=False, sequence_data_parallel_group=None, "
    "param_swapper=None)",
)
_MICS_INIT = classes(
    f"{_ADAPT}.building",
    "MiCS_Init(module=None, data_parallel_group=None, sequence_data_parallel_group=None, mem_efficient_linear=True, "
    "remote_device=None, pin_memory=False, config_dict_or_path=None, config=None, enabled=True, dtype=None, mpu=None)",
)
_EXTERNAL = functions("shardwise.zero", "register_external_parameter(module, parameter)")
_UNREGISTER = functions("shardwise.zero", "unregister_external_parameter(module, parameter)")
_STATUS = classes("shardwise.zero.units.status", "ZeroParamStatus")
_ESTIMATE_2 = functions(
    f"{_ADAPT}.estimates",
    "estimate_zero2_model_states_mem_needs(total_params, num_gpus_per_node=1, num_nodes=1, cpu_offload=True, "
    "additional_buffer_factor=1.5)",
    "estimate_zero2_model_states_mem_needs_all_live(model, num_gpus_per_node=1, num_nodes=1, "
    "additional_buffer_factor=1.5)",
    "estimate_zero2_model_states_mem_needs_all_cold(total_params, num_gpus_per_node=1, num_nodes=1, "
    "additional_buffer_factor=1.5)",
)
_ESTIMATE_3 = functions(
    f"{_ADAPT}.estimates",
    "estimate_zero3_model_states_mem_needs(total_params, largest_layer_params, num_gpus_per_node=1, num_nodes=1, "
    "cpu_offload=True, cpu_offload_params=True, zero_init=True, additional_buffer_factor=1.5)",
    "estimate_zero3_model_states_mem_needs_all_live(model, num_gpus_per_node=1, num_nodes=1, "
    "additional_buffer_factor=1.5)",
    "estimate_zero3_model_states_mem_needs_all_cold(total_params, largest_layer_params, num_gpus_per_node=1, "
    "num_nodes=1, additional_buffer_factor=1.5)",
)
_BACKENDS = "it is one of DeepSpeed's own backends: torch.distributed's process groups are used as they are"
_COLLECTIVE = "group=None, async_op=False, prof=False, log_name=None, debug=None)"
_COMM = merge(
    functions(
        _API,
        f"broadcast(tensor, src, {_COLLECTIVE}",
        f"all_gather(tensor_list, tensor, {_COLLECTIVE}",
        f"all_gather_into_tensor(output_tensor, tensor, {_COLLECTIVE}",
        "all_gather_object(object_list, obj, group=None)",
        f"reduce(tensor, dst, op=..., {_COLLECTIVE}",
        f"all_reduce(tensor, op=..., {_COLLECTIVE}",
        f"reduce_scatter(output, input_list, op=..., {_COLLECTIVE}",
        f"reduce_scatter_tensor(output_tensor, tensor, op=..., {_COLLECTIVE}",
        f"all_to_all(output_tensor_list, input_tensor_list, {_COLLECTIVE}",
        "all_to_all_single(output, tensor, output_split_sizes=None, input_split_sizes=None, group=None, "
        "async_op=False, prof=False, log_name=None, debug=None)",
        f"gather(tensor, gather_list=None, dst=0, {_COLLECTIVE}",
        f"scatter(tensor, scatter_list=None, src=0, {_COLLECTIVE}",
        "send(tensor, dst, group=None, tag=0, prof=False, log_name=None, debug=None)",
        "recv(tensor, src=None, group=None, tag=0, prof=False, log_name=None, debug=None)",
        "isend(tensor, dst, group=None, tag=0, prof=False, log_name=None, debug=None)",
        "irecv(tensor, src=None, group=None, tag=0, prof=False, log_name=None, debug=None)",
        "barrier(group=None, async_op=False, device_ids=None, prof=False, log_name=None, debug=None)",
        "monitored_barrier(group=None, timeout=None, wait_all_ranks=False, prof=False, log_name=None, debug=None)",
        "broadcast_object_list(object_list, src, group=None, device=None)",
        "is_available()",
        "get_rank(group=None)",
        "get_world_size(group=None)",
        "get_local_rank()",
        "get_global_rank(group, group_rank)",
        "get_world_group()",
        "get_all_ranks_from_group(group=None)",
        "destroy_process_group(group=None)",
        "new_group(ranks)",
        "configure(deepspeed_config=None, enabled=None, prof_all=None, prof_ops=None, verbose=None, debug=None)",
        "log_summary(show_straggler=False, return_dict=False)",
        "reset_log()",
        "has_comm_data()",
        "get_comm_operation_count()",
        "get_logged_comm_ops()",
    ),
    functions(f"{_ADAPT}.clients", "is_initialized()", _INIT_DISTRIBUTED),
    functions(
        f"{_ADAPT}.collectives",
        "allgather_fn",
        "reduce_scatter_fn",
        f"inference_all_reduce(tensor, op=..., {_COLLECTIVE}",
        "has_all_gather_into_tensor()",
        "has_reduce_scatter_tensor()",
        "has_all_reduce_coalesced()",
        "has_coalescing_manager()",
        "all_gather_coalesced",
        "all_reduce_coalesced",
        "batch_isend_irecv",
    ),
    classes("torch.distributed", "ReduceOp", "ProcessGroup", "P2POp"),
    values("shardwise.comm.logger", "comms_logger"),
    functions(f"{_ADAPT}.clients", "initialize_mesh_device(mesh_shape, mesh_dim_names)"),
    stubs(_BACKENDS, "set_backend init_deepspeed_backend TorchBackend enable_symm_mem_for_group"),
    missing(_BACKENDS, "cdb", "scripts compare it with None, which a stub never equals"),
    stubs(
        "init_distributed() finds the place of a process under torchrun, MPI and Slurm by itself",
        "mpi_discovery in_aml in_aws_sm in_dlts",
    ),
)
_TILED = stubs(TILED, "TiledLinear TiledLinearReturnBias")
_ZERO = merge(
    _INIT,
    _GATHERED,
    _EXTERNAL,
    _STATUS,
    _TILED,
    _MICS_INIT,
    stubs(WRAPPERS, "DeepSpeedZeRoOffload DeepSpeedTensorOverride ZeroParamType"),
    functions(f"{_ADAPT}.building", "unwrap_model_for_generation"),
)
_GROUPS = merge(
    functions(
        f"{_ADAPT}.groups",
        "initialize(ep_size=1, mpu=None)",
        *(
            f"{prefix}_{kind}_parallel_{what}()"
            for prefix, kinds, whats in (
                ("get", ("data", "model", "tensor"), ("group", "rank", "world_size")),
                ("_get", ("data", "sequence", "sequence_data"), ("group", "rank", "world_size")),
            )
            for kind in kinds
            for what in whats
        ),
    ),
    functions(
        f"{_ADAPT}.groups",
        *(
            f"get_tensor_model_parallel_{what}() = get_tensor_parallel_{what}"
            for what in ("group", "rank", "world_size")
        ),
    ),
    values(f"{_ADAPT}.groups", "mpu", "mesh_device"),
    stubs(
        "an engine makes the groups of its layers: engine.expert_parallel_group has them",
        "_get_expert_parallel_group _get_expert_parallel_rank _get_expert_parallel_world_size "
        "_get_expert_data_parallel_group _get_expert_data_parallel_rank _get_expert_data_parallel_world_size "
        "_get_max_expert_size _get_max_expert_size_name",
    ),
    stubs(
        "it is set by zero_optimization.zero_hpz_partition_size, and is the engine's own",
        "_get_zero_param_intra_parallel_group _get_zero_param_parallel_group",
    ),
    stubs(
        "groups are those of an engine, of tp_model_init or of `mpu`; they are not set",
        "set_tensor_parallel_group set_tensor_parallel_rank set_tensor_parallel_world_size "
        "set_model_parallel_group set_model_parallel_rank set_model_parallel_world_size "
        "set_data_parallel_group set_data_parallel_rank set_data_parallel_world_size",
    ),
)
_MOE = classes(
    "shardwise.moe.layer",
    "MoE(hidden_size, expert, num_experts=1, ep_size=1, k=1, capacity_factor=1.0, eval_capacity_factor=1.0, "
    "min_capacity=4, use_residual=False, noisy_gate_policy=None, drop_tokens=True, use_rts=True, use_tutel=False, "
    "enable_expert_tensor_parallelism=False, top2_2nd_expert_sampling=True)",
)
_COMMS_LOGGING = merge(
    classes("shardwise.comm.logger", "CommsLogger"),
    functions(f"{_ADAPT}.collectives", "calc_bw_log", "convert_size"),
)
_DEBUG = merge(
    functions(
        "shardwise.zero.access",
        "safe_get_full_fp32_param",
        "safe_set_full_fp32_param",
        "safe_get_full_optimizer_state",
        "safe_set_full_optimizer_state",
        "safe_get_full_grad",
        "safe_set_full_grad",
        "safe_get_local_fp32_param",
        "safe_set_local_fp32_param",
        "safe_get_local_optimizer_state",
        "safe_set_local_optimizer_state",
        "safe_get_local_grad",
        "safe_set_local_grad",
        "safe_update_full_grad_vectorized(param_list, update_func)",
    ),
    stubs(
        INNER,
        "get_full_hp_param set_full_hp_param get_full_hp_grad set_full_hp_grad get_hp_fragment_mapping "
        "fragment_address:class tensor_fragment:class map_to_flat_opt_states link_hp_params "
        "lazy_init_hp_params_optimizer_state",
    ),
)
_NVTX = functions("shardwise.utils.nvtx", "instrument_w_nvtx(func)")
_NUMA = "the launcher binds processes to cores by itself (--bind_cores_to_rank), without numactl"
_MUON = "Muon is `optimizer.type` Muon of the configuration, or `shardwise.optim.Muon`"
_OFFLOAD_SECTIONS = merge(
    classes(f"{_ADAPT}.constants", "OffloadDeviceEnum"),
    classes("shardwise.config.schema.offload", "DeepSpeedZeroOffloadParamConfig = OffloadParam"),
    classes("shardwise.config.schema.offload", "DeepSpeedZeroOffloadOptimizerConfig = OffloadOptimizer"),
)
_TUNING = functions("shardwise.schedules", "add_tuning_arguments(parser)")
_CHECKPOINTING = merge(
    functions(
        f"{_ADAPT}.configuration",
        "configure(mpu_, deepspeed_config=None, partition_activations=None, contiguous_checkpointing=None, "
        "num_checkpoints=None, checkpoint_in_cpu=None, synchronize=None, profile=None) = configure_checkpointing",
    ),
    functions(
        "shardwise.recompute",
        "is_configured()",
        "reset()",
        "partition_activations_in_checkpoint(partition_activation)",
        "checkpoint(function, *args, **kwargs)",
        "non_reentrant_checkpoint(function, *args)",
    ),
    functions(
        "shardwise.recompute",
        "get_cuda_rng_tracker()",
        "model_parallel_cuda_manual_seed(seed)",
        "model_parallel_reconfigure_tp_seed(seed)",
    ),
    classes("shardwise.recompute", "CudaRNGStatesTracker"),
    stubs(
        "saved inputs are divided, and put together, where autograd keeps them",
        "gather_partitioned_activations extract_tensors merge_tensors",
    ),
    stubs("saved inputs are in no buffer that would have to be sized", "set_num_layers"),
    stubs("checkpoint() is torch's non-reentrant one, which has no autograd function", "CheckpointFunction"),
    missing(
        "copies without history are torch's business",
        "detach_variable",
        "trainers that took Unsloth's offloaded checkpointing define their own when the import fails",
    ),
)
_DIVIDED = classes("shardwise.parallel.tensor.layers", "LinearLayer = ColumnParallel", "LinearAllreduce = RowParallel")
_TRANSFORMER = "DeepSpeedTransformerLayer DeepSpeedTransformerConfig"
_PIPELINE_MODULE = classes("shardwise.pipe", "PipelineModule", "LayerSpec", "TiedLayerSpec")
_PIPELINE_ENGINE = classes("shardwise.engine", "PipelineEngine")

_ENGINES = "checkpoints are written by `shardwise.checkpoint`, which has no exchangeable engines"
_ONEBIT = "1-bit optimizers communicate through torch.distributed's process groups, without backends of their own"

_FUSED_ADAM = classes(
    f"{_ADAPT}.optimizers",
    "FusedAdam(params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, adam_w_mode=True, "
    "weight_decay=0.0, amsgrad=False, set_grad_none=True)",
)
_CPU_ADAM = classes(
    f"{_ADAPT}.optimizers",
    "DeepSpeedCPUAdam(model_params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, "
    "weight_decay=0.0, amsgrad=False, adamw_mode=True, fp32_optimizer_states=True)",
)
_CPU_ADAGRAD = classes(
    f"{_ADAPT}.optimizers",
    "DeepSpeedCPUAdagrad(model_params, lr=1e-2, eps=1e-10, weight_decay=0.0, amsgrad=False, "
    "fp32_optimizer_states=True)",
)
_FUSED_LION = classes(
    f"{_ADAPT}.optimizers",
    "FusedLion(params, lr=1e-3, betas=(0.9, 0.999), weight_decay=0.0, set_grad_none=True)",
)
_CPU_LION = classes(
    f"{_ADAPT}.optimizers",
    "DeepSpeedCPULion(model_params, lr=1e-3, betas=(0.9, 0.999), weight_decay=0.0, fp32_optimizer_states=True)",
)
_FUSED_LAMB = classes(
    "shardwise.optim",
    "FusedLamb(params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, eps_inside_sqrt=False, "
    "weight_decay=0.0, max_grad_norm=0.0, max_coeff=10.0, min_coeff=0.01, amsgrad=False) = Lamb",
)
_CHECKPOINT_KEYS = values(
    f"{_ADAPT}.keys",
    *("OPTIMIZER_STATE_DICT", "FP32_FLAT_GROUPS", "SINGLE_PARTITION_OF_FP32_GROUPS", "BASE_OPTIMIZER_STATE"),
    *("GROUP_PADDINGS", "PARAM_SLICE_MAPPINGS", "PARTITION_COUNT", "ZERO_STAGE", "LOSS_SCALER", "CLIP_GRAD"),
    *("DS_VERSION", "BUFFER_NAMES", "PARAM_SHAPES", "FROZEN_PARAM_SHAPES", "FROZEN_PARAM_FRAGMENTS"),
    "UNIVERSAL_CHECKPOINT_INFO",
)
_CHECKPOINT_KEYS = merge(
    _CHECKPOINT_KEYS,
    values(
        f"{_ADAPT}.checkpoint_keys",
        *(name for name in vars(checkpoint_keys) if name.isupper()),
    ),
)
_ONE_MACHINE = "processes are started by `shardwise run`, on one machine"
_FLOPS_PROFILER = merge(
    classes("shardwise.profile", "FlopsProfiler(model, ds_engine=None, recompute_fwd_factor=0.0)"),
    functions(
        "shardwise.profile",
        "get_model_profile(model, input_shape=None, args=..., kwargs=..., print_profile=True, detailed=True, "
        "module_depth=-1, top_modules=1, warm_up=1, as_string=True, output_file=None, ignore_modules=None, "
        "mode='forward')",
    ),
    functions(
        "shardwise.profile.words",
        "number_to_string(num, units=None, precision=...)",
        "macs_to_string(macs, units=None, precision=...)",
        "flops_to_string(flops, units=None, precision=...)",
        "bytes_to_string(b, units=None, precision=...)",
        "params_to_string(params_num, units=None, precision=...)",
        "duration_to_string(duration, units=None, precision=...)",
    ),
    stubs(
        "nothing is put on modules: FlopsProfiler(...).profile has what each of them computes",
        "get_module_flops get_module_macs get_module_duration",
    ),
)
_UNKNOWN = "no script is known that imports a name of it"
_OLD = "scripts for its versions of 2020 and 2021 import it"
_TOPOLOGY = classes("shardwise.pipe", "ProcessTopology")

TABLE: dict[str, dict[str, Entry]] = {
    "deepspeed": merge(
        functions(f"{_ADAPT}.clients", f"initialize{_INITIALIZE}", f"initialize_engine{_INITIALIZE} = initialize"),
        functions(f"{_ADAPT}.clients", _INIT_DISTRIBUTED),
        functions("shardwise.launch.arguments", "add_config_arguments(parser)"),
        functions(f"{_ADAPT}.configuration", "load_ds_config"),
        _TUNING,
        _ENGINE,
        _CONFIG,
        _OPTIMIZER,
        _LOADER,
        _ON_DEVICE,
        _ACCELERATOR,
        functions(f"{_ADAPT}.logs", "log_dist(message, ranks=None, level=20)"),
        values(f"{_ADAPT}.logs", "logger"),
        values(f"{_ADAPT}.engine_optimizer", "DeepSpeedOptimizerCallable", "DeepSpeedSchedulerCallable"),
        values(
            "shardwise.dropin.version",
            *("__version__", "__version_major__", "__version_minor__", "__version_patch__", "version"),
            *("__git_hash__", "__git_branch__", "git_hash", "git_branch"),
        ),
        values(f"{_ADAPT}.constants", "ADAM_OPTIMIZER", "LAMB_OPTIMIZER", "MUON_OPTIMIZER"),
        values(f"{_ADAPT}.constants", "HAS_TRITON", "TORCH_DISTRIBUTED_DEFAULT_PORT"),
        modules("zero = deepspeed.runtime.zero", "dist = deepspeed.comm"),
        classes("shardwise.pipe", "PipelineModule"),
        _PIPELINE_ENGINE,
        stubs(DUAL_PIPE, "DualPipeVEngine DualPipeVModule"),
        stubs(INFERENCE, "init_inference default_inference_config InferenceEngine DeepSpeedInferenceConfig"),
        stubs(HYBRID, "DeepSpeedHybridEngine"),
        functions("shardwise.parallel", "tp_model_init(model, tp_size, dtype, config=None)"),
        functions(f"{_ADAPT}.tensors", "set_autotp_mode(training=False)"),
        stubs(
            "tp_model_init() divides the model at once: nothing is recorded for a configuration",
            "merge_tp_model_init_into_config record_tp_model_init_args",
        ),
        stubs(LAYERS, f"{_TRANSFORMER} replace_transformer_layer revert_transformer_layer"),
        functions(f"{_ADAPT}.helpers", "is_compile_supported()"),
        stubs("Muon finds the matrices that it steps by itself", "set_optimizer_flags"),
    ),
    "deepspeed.git_version_info": merge(
        values("shardwise.dropin.version", "version", "git_hash", "git_branch"),
        values(f"{_ADAPT}.build", "torch_info = TORCH_INFO", "accelerator_name = ACCELERATOR_NAME"),
        values(f"{_ADAPT}.operators", "compatible_ops = COMPATIBLE_OPS", "installed_ops = COMPATIBLE_OPS"),
    ),
    "deepspeed.constants": merge(
        values(f"{_ADAPT}.constants", "TORCH_DISTRIBUTED_DEFAULT_PORT"),
        values(f"{_ADAPT}.keys", "CROSS_RANK", "CROSS_SIZE"),
        values("shardwise.comm.setup", "default_pg_timeout = DEFAULT_TIMEOUT"),
    ),
    # -- communication ------------------------------------------------------------------------------------------------
    "deepspeed.comm": _COMM,
    "deepspeed.comm.comm": _COMM,
    "deepspeed.comm.torch": merge(
        functions(f"{_ADAPT}.collectives", "has_all_reduce_coalesced()", "has_coalescing_manager()"),
        stubs(_BACKENDS, "TorchBackend get_coalescing_manager"),
    ),
    "deepspeed.comm.reduce_op": classes("torch.distributed", "ReduceOp"),
    "deepspeed.comm.constants": stubs(
        INNER,
        "COMMS_LOGGER_VERBOSE_DEFAULT COMMS_LOGGER_DEBUG_DEFAULT COMMS_LOGGER_PROF_ALL_DEFAULT "
        "COMMS_LOGGER_PROF_OPS_DEFAULT NCCL_BACKEND CCL_BACKEND MPI_BACKEND GLOO_BACKEND",
    ),
    "deepspeed.accelerator": merge(
        _ACCELERATOR,
        functions(f"{_ADAPT}.accelerator", "set_accelerator", "is_current_accelerator_supported"),
        _ACCELERATOR_CLASS,
    ),
    "deepspeed.accelerator.abstract_accelerator": _ACCELERATOR_CLASS,
    "deepspeed.accelerator.real_accelerator": merge(
        _ACCELERATOR, functions(f"{_ADAPT}.accelerator", "set_accelerator", "is_current_accelerator_supported")
    ),
    # -- utilities ----------------------------------------------------------------------------------------------------
    "deepspeed.utils": merge(
        _LOGGING,
        _GROUPS,
        _DEBUG,
        _LEAVES,
        _REPEATING,
        _ON_DEVICE,
        functions(f"{_ADAPT}.collectives", "is_initialized()"),
        _NVTX,
        stubs("leaves are modules here, not parameters", "z3_leaf_parameter"),
        stubs(INNER, "get_caller_func"),
        stubs(_NUMA, "get_numactl_cmd"),
    ),
    "deepspeed.utils.logging": merge(
        _LOGGING,
        functions(
            f"{_ADAPT}.logs",
            "print_dist",
            "print_json_dist",
            "should_log_le",
            "get_current_level",
        ),
        classes(f"{_ADAPT}.logs", "LoggerFactory"),
        stubs("`shardwise check` prints configurations", "print_configuration"),
    ),
    "deepspeed.utils.groups": _GROUPS,
    "deepspeed.utils.comms_logging": _COMMS_LOGGING,
    "deepspeed.utils.module_utils": functions(
        f"{_ADAPT}.helpers",
        "recursive_getattr(model, module_name)",
        "recursive_setattr(model, module_name, module)",
    ),
    "deepspeed.utils.init_on_device": _ON_DEVICE,
    "deepspeed.utils.torch": functions(
        f"{_ADAPT}.helpers", "required_torch_version(min_version=None, max_version=None)"
    ),
    "deepspeed.utils.exceptions": stubs("nothing raises it", "DeprecatedException"),
    "deepspeed.utils.timer": merge(
        classes(
            "shardwise.profile.timers",
            "SynchronizedWallClockTimer()",
            "ThroughputTimer(config, batch_size, start_step=2, steps_per_output=None, monitor_memory=False, "
            "logging_fn=None)",
            "NoopTimer",
        ),
        functions("shardwise.profile.timers", "trim_mean(data, trim_percent)"),
        values(
            "shardwise.profile.timers",
            *("FORWARD_MICRO_TIMER", "FORWARD_GLOBAL_TIMER", "BACKWARD_MICRO_TIMER", "BACKWARD_GLOBAL_TIMER"),
            *("BACKWARD_INNER_MICRO_TIMER", "BACKWARD_INNER_GLOBAL_TIMER", "BACKWARD_REDUCE_MICRO_TIMER"),
            *("BACKWARD_REDUCE_GLOBAL_TIMER", "STEP_MICRO_TIMER", "STEP_GLOBAL_TIMER", "TIME_EPSILON"),
        ),
        stubs("SynchronizedWallClockTimer takes a device's events by itself", "CudaEventTimer"),
    ),
    "deepspeed.utils.nvtx": _NVTX,
    "deepspeed.utils.numa": stubs(_NUMA, "get_numactl_cmd"),
    "deepspeed.utils.distributed": functions("shardwise.comm.setup", _INIT_DISTRIBUTED),
    "deepspeed.utils.tensor_fragment": _DEBUG,
    "deepspeed.utils.mixed_precision_linkage": stubs(INNER, "link_hp_params lazy_init_hp_params_optimizer_state"),
    "deepspeed.utils.z3_leaf_module": merge(
        _LEAVES, stubs("leaves are modules here, not parameters", "z3_leaf_parameter")
    ),
    "deepspeed.utils.debug": merge(
        stubs(
            "names of parameters are engine.param_names, and messages carry them",
            "debug_extract_module_and_param_names debug_clear_module_and_param_names debug_module2name "
            "debug_module2name_id debug_module2name_class debug_param2name debug_param2name_id "
            "debug_param2name_id_shape debug_param2name_id_shape_device debug_param2name_id_shape_status "
            "module_names:value param_names:value",
        ),
        stubs(INNER, "debug_rank0 log_rank_file print_backward_tensors"),
    ),
    "deepspeed.utils.types": stubs(INFERENCE, "ActivationFuncType NormType"),
    "deepspeed.utils.bwc": functions(
        f"{_ADAPT}.helpers",
        "bwc_tensor_model_parallel_rank(mpu=None)",
        "bwc_tensor_model_parallel_world_size(mpu=None)",
        "bwc_tensor_model_parallel_group(mpu=None)",
        "bwc_pipeline_parallel_world_size(mpu=None)",
        "bwc_pipeline_parallel_group(mpu=None)",
    ),
    "deepspeed.utils.zero_to_fp32": merge(
        functions(
            "shardwise.utils.zero_to_fp32",
            "get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag=None, exclude_frozen_parameters=False, "
            "lazy_mode=False)",
            "convert_zero_checkpoint_to_fp32_state_dict(checkpoint_dir, output_dir, max_shard_size='5GB', "
            "safe_serialization=False, tag=None, exclude_frozen_parameters=False)",
            "load_state_dict_from_zero_checkpoint(model, checkpoint_dir, tag=None)",
            "get_optim_files(checkpoint_dir)",
            "get_model_state_file(checkpoint_dir, zero_stage)",
        ),
        stubs(FILES, "get_model_state_files parse_model_states parse_optim_states"),
    ),
    # -- ZeRO ---------------------------------------------------------------------------------------------------------
    "deepspeed.runtime.zero": _ZERO,
    "deepspeed.runtime.zero.partition_parameters": merge(
        _ZERO,
        _UNREGISTER,
        _ACCELERATOR,
        functions(
            f"{_ADAPT}.building",
            "zero_wrapper_for_fp_tensor_constructor",
        ),
        values(f"{_ADAPT}.building", "_orig_torch_arange"),
        stubs("initialize() suspends an open zero.Init by itself", "shutdown_init_context restore_init_context"),
        stubs(
            WRAPPERS,
            "PartitionedParamStatus InsertPostInitMethodToModuleSubClasses AllGatherCoalescedHandle AllGatherHandle "
            "NoGatherHandle CUDAQuantizer free_param get_all_subclasses",
        ),
        functions(f"{_ADAPT}.building", "is_zero_param"),
        classes("torch.nn", "Parameter"),
        classes("torch", "Tensor"),
    ),
    "deepspeed.runtime.zero.parameter_offload": merge(
        functions(f"{_ADAPT}.building", "is_zero_param"),
        stubs(WRAPPERS, "DeepSpeedZeRoOffload ZeROOrderedDict FWD_MODULE_STACK"),
    ),
    "deepspeed.runtime.zero.partitioned_param_coordinator": stubs(
        WRAPPERS, "PartitionedParameterCoordinator InflightParamRegistry iter_params get_all_parameters"
    ),
    "deepspeed.runtime.zero.stage3": merge(
        _ESTIMATE_3,
        functions(f"{_ADAPT}.building", "unwrap_model_for_generation"),
        stubs(
            WRAPPERS,
            "DeepSpeedZeroOptimizer_Stage3 DeepSpeedZeroOptimizer FWD_MODULE_STACK INIT_OPTIMIZER_TIMER print_rank_0",
        ),
    ),
    "deepspeed.runtime.zero.stage_1_and_2": merge(_ESTIMATE_2, stubs(WRAPPERS, "DeepSpeedZeroOptimizer")),
    "deepspeed.runtime.zero.tiling": _TILED,
    "deepspeed.runtime.zero.mics": merge(
        _MICS_INIT,
        stubs(MICS, "MiCS_Optimizer MiCS_Offload MiCS_AllGatherCoalescedHandle create_mics_comm_groups"),
    ),
    "deepspeed.runtime.zero.mics_utils": stubs(MICS, "MiCS_CommGroups create_mics_comm_groups scale_tensors"),
    "deepspeed.runtime.zero.muon.muon_optimizer": stubs(_MUON, "MuonWithAuxAdam"),
    "deepspeed.runtime.zero.muon.original_muon": stubs(
        _MUON,
        "Muon MuonWithAuxAdam SingleDeviceMuon SingleDeviceMuonWithAuxAdam adam_update muon_update "
        "zeropower_via_newtonschulz5 zeropower_via_gram_newtonschulz",
    ),
    "deepspeed.runtime.zero.config": merge(
        classes("shardwise.config.schema", "DeepSpeedZeroConfig = ZeroConfig"),
        classes(f"{_ADAPT}.constants", "ZeroStageEnum"),
        _OFFLOAD_SECTIONS,
    ),
    "deepspeed.runtime.zero.leaf_module_config": merge(
        classes("shardwise.config.schema.zero", "DeepSpeedZeroLeafModuleConfig = LeafModule"),
        values(
            f"{_ADAPT}.keys",
            *("DEFAULT_LEAF_MODULE_CLASSES", "DEFAULT_LEAF_MODULE_NAMES", "DEFAULT_LEAF_MODULE_NAME_SUFFIXES"),
        ),
    ),
    "deepspeed.runtime.zero.offload_config": merge(
        _OFFLOAD_SECTIONS,
        classes("shardwise.zero", "OffloadStateTypeEnum"),
        stubs(SWAPPERS, "resolve_nvme_path"),
    ),
    "deepspeed.runtime.zero.offload_states": functions("shardwise.engine.states", "get_state_devices(model, state)"),
    "deepspeed.runtime.zero.utils": merge(
        functions(f"{_ADAPT}.building", "is_zero_param"),
        functions(f"{_ADAPT}.engine_optimizer", "is_zero_supported_optimizer"),
        classes("shardwise.errors", "ZeRORuntimeException = ShardwiseError"),
        stubs(WRAPPERS, "apply_to_tensors_only assert_ints_same_as_other_ranks get_lst_from_rank0"),
    ),
    "deepspeed.runtime.zero.linear": stubs(
        WRAPPERS,
        "LinearModuleForZeroStage3 LinearFunctionForZeroStage3 zero3_linear_wrap zero3_linear_module_forward "
        "zero3_gathered_param autocast_custom_fwd autocast_custom_bwd",
    ),
    # -- the engine and its components --------------------------------------------------------------------------------
    "deepspeed.runtime.engine": merge(
        _ENGINE,
        values(f"{_ADAPT}.engine_optimizer", "DeepSpeedOptimizerCallable", "DeepSpeedSchedulerCallable"),
        values(f"{_ADAPT}.constants", "ADAM_OPTIMIZER", "LAMB_OPTIMIZER"),
        stubs(INNER, "MEMORY_OPT_ALLREDUCE_SIZE EngineTimers"),
    ),
    "deepspeed.runtime": merge(_OPTIMIZER, _ZERO_OPTIMIZER),
    "deepspeed.runtime.base_optimizer": merge(_OPTIMIZER, _ZERO_OPTIMIZER, stubs(INNER, "BackwardHookStateManager")),
    "deepspeed.runtime.config": merge(
        _CONFIG,
        functions(f"{_ADAPT}.configuration", "get_gradient_clipping(param_dict)"),
        values(
            f"{_ADAPT}.constants",
            *("ADAM_OPTIMIZER", "ADAMW_OPTIMIZER", "ADAGRAD_OPTIMIZER", "LAMB_OPTIMIZER", "LION_OPTIMIZER"),
            *("ONEBIT_ADAM_OPTIMIZER", "ONEBIT_LAMB_OPTIMIZER", "ZERO_ONE_ADAM_OPTIMIZER", "MUON_OPTIMIZER"),
            *("MUADAM_OPTIMIZER", "MUADAMW_OPTIMIZER", "MUSGD_OPTIMIZER", "DEEPSPEED_OPTIMIZERS"),
        ),
    ),
    "deepspeed.runtime.precision_config": functions(
        f"{_ADAPT}.configuration", "get_bfloat16_config(param_dict)", "get_float16_config(param_dict)"
    ),
    "deepspeed.runtime.config_utils": merge(
        classes("shardwise.config.schema", "DeepSpeedConfigModel = ConfigSection"),
        functions(
            f"{_ADAPT}.configuration",
            "get_scalar_param(param_dict, param_name, param_default_value)",
            "get_list_param(param_dict, param_name, param_default_value)",
            "get_dict_param(param_dict, param_name, param_default_value)",
            "dict_raise_error_on_duplicate_keys(ordered_pairs)",
        ),
        stubs("sections are pydantic models here (DeepSpeedConfigModel)", "DeepSpeedConfigObject"),
        stubs(INNER, "ScientificNotationEncoder pp_int"),
    ),
    "deepspeed.runtime.constants": merge(
        values(f"{_ADAPT}.constants", "ROUTE_TRAIN", "ROUTE_EVAL", "ROUTE_PREDICT"),
        values(
            f"{_ADAPT}.keys",
            *("TRAIN_BATCH_SIZE", "TRAIN_MICRO_BATCH_SIZE_PER_GPU", "GRADIENT_ACCUMULATION_STEPS"),
            *("GRADIENT_CLIPPING", "GRADIENT_CLIPPING_DEFAULT", "STEPS_PER_PRINT", "OPTIMIZER", "SCHEDULER", "TYPE"),
            *("OPTIMIZER_TYPE_DEFAULT", "SCHEDULER_TYPE_DEFAULT", "FP16", "BFLOAT16"),
        ),
        values(
            f"{_ADAPT}.config_keys",
            *(name for name in vars(config_keys) if name.isupper()),
        ),
        stubs(PIPELINE, "PIPE_REPLICATED"),
        stubs(INNER, "DATA_PARALLEL_GROUP GLOBAL_RANK"),
    ),
    "deepspeed.runtime.dataloader": merge(_LOADER, _REPEATING),
    "deepspeed.runtime.lr_schedules": merge(
        classes(
            "shardwise.schedules",
            "LRRangeTest(optimizer, lr_range_test_min_lr=0.001, lr_range_test_step_size=2000, "
            "lr_range_test_step_rate=1.0, lr_range_test_staircase=False, last_batch_iteration=-1)",
            "OneCycle(optimizer, cycle_min_lr, cycle_max_lr, decay_lr_rate=0.0, cycle_first_step_size=2000, "
            "cycle_second_step_size=None, cycle_first_stair_count=0, cycle_second_stair_count=None, "
            "decay_step_size=0, cycle_momentum=True, cycle_min_mom=0.8, cycle_max_mom=0.9, decay_mom_rate=0.0, "
            "last_batch_iteration=-1)",
            "WarmupLR(optimizer, warmup_min_lr=0.0, warmup_max_lr=None, warmup_num_steps=1000, warmup_type='log', "
            "last_batch_iteration=-1)",
            "WarmupDecayLR(optimizer, total_num_steps, warmup_min_lr=0.0, warmup_max_lr=..., warmup_num_steps=1000, "
            "warmup_type='log', last_batch_iteration=-1)",
            "WarmupCosineLR(optimizer, total_num_steps, warmup_min_ratio=0.0, warmup_num_steps=1000, "
            "cos_min_ratio=0.0001, warmup_type='log', last_batch_iteration=-1)",
        ),
        values("shardwise.schedules", "VALID_LR_SCHEDULES"),
        values(
            f"{_ADAPT}.keys",
            *("LR_SCHEDULE", "LR_RANGE_TEST", "ONE_CYCLE", "WARMUP_LR", "WARMUP_DECAY_LR", "WARMUP_COSINE_LR"),
            *("LR_RANGE_TEST_MIN_LR", "LR_RANGE_TEST_STEP_RATE", "LR_RANGE_TEST_STEP_SIZE", "LR_RANGE_TEST_STAIRCASE"),
            *("EDGE_VALUE", "MID_VALUE", "CYCLE_FIRST_STEP_SIZE", "CYCLE_FIRST_STAIR_COUNT", "CYCLE_SECOND_STEP_SIZE"),
            *("CYCLE_SECOND_STAIR_COUNT", "CYCLE_MIN_LR", "CYCLE_MAX_LR", "CYCLE_MIN_MOM", "CYCLE_MAX_MOM"),
            *("CYCLE_MOMENTUM", "DECAY_STEP_SIZE", "DECAY_LR_RATE", "DECAY_MOM_RATE", "WARMUP_MIN_LR"),
            *("WARMUP_MAX_LR", "WARMUP_NUM_STEPS", "WARMUP_TYPE", "WARMUP_LOG_RATE", "WARMUP_LINEAR_RATE"),
            *("WARMUP_MIN_RATIO", "COS_MIN_RATIO", "TOTAL_NUM_STEPS"),
        ),
        _TUNING,
        functions(
            "shardwise.schedules",
            "parse_arguments",
            "get_config_from_args",
            "get_lr_from_config",
            "override_params",
        ),
        functions(f"{_ADAPT}.helpers", "get_torch_optimizer", "update_lr"),
    ),
    "deepspeed.runtime.utils": merge(
        functions(
            "shardwise.memory",
            "memory_status(msg, print_rank=-1, reset_max=False)",
            "see_memory_usage(message, force=False)",
        ),
        functions(
            f"{_ADAPT}.helpers",
            "clip_grad_norm_(parameters, max_norm, norm_type=2, mpu=None)",
            "move_to_device(item, device, criterion_func=None)",
            "copy_to_device",
            "set_random_seed",
            "empty_cache",
            "ensure_directory_exists",
            "get_only_unique_item",
            "call_to_str",
            "noop_decorator",
            "required_torch_version(min_version=None, max_version=None)",
        ),
        functions(f"{_ADAPT}.helpers", "bwc_tensor_model_parallel_rank(mpu=None)"),
        stubs(PIPELINE, "partition_uniform partition_balanced prefix_sum_inc PartitionedTensor"),
        functions(f"{_ADAPT}.tensors", "is_model_parallel_parameter(p)"),
        stubs("get_accelerator().memory_allocated() returns it", "get_ma_status"),
        stubs("CUDA graphs of optimizer kernels are not built yet", "graph_process"),
        stubs(
            INNER,
            "get_flattened_grad_norm get_global_norm get_grad_norm get_weight_norm "
            "has_inf_or_nan mask_nan_or_inf_with_val_inplace CheckOverflow DummyOptim align_dense_tensors "
            "all_gather_dp_groups get_inactive_params compare_tensors_in_structures torch_memory_reserved",
        ),
    ),
    "deepspeed.runtime.fp16.fused_optimizer": stubs(WRAPPERS, "FP16_Optimizer"),
    "deepspeed.runtime.fp16.unfused_optimizer": stubs(WRAPPERS, "FP16_UnfusedOptimizer"),
    "deepspeed.runtime.fp16.loss_scaler": stubs(
        "the loss scale is the engine's (engine.cur_scale, section fp16)",
        "LossScaler LossScalerBase LossScaleConfig DynamicLossScaler CreateLossScaler INITIAL_LOSS_SCALE SCALE_WINDOW "
        "MIN_LOSS_SCALE DELAYED_SHIFT",
    ),
    "deepspeed.runtime.bf16_optimizer": stubs(WRAPPERS, "BF16_Optimizer"),
    "deepspeed.runtime.fp16.onebit": classes("shardwise.optim", "OnebitAdam", "OnebitLamb", "ZeroOneAdam"),
    "deepspeed.runtime.fp16.onebit.adam": classes("shardwise.optim", "OnebitAdam"),
    "deepspeed.runtime.fp16.onebit.lamb": classes("shardwise.optim", "OnebitLamb"),
    "deepspeed.runtime.fp16.onebit.zoadam": classes("shardwise.optim", "ZeroOneAdam"),
    "deepspeed.runtime.sparse_tensor": stubs("sparse gradients are made dense before they are reduced", "SparseTensor"),
    "deepspeed.runtime.hybrid_engine": stubs(HYBRID, "DeepSpeedHybridEngine"),
    "deepspeed.runtime.compiler": merge(
        functions(f"{_ADAPT}.helpers", "is_compile_supported()"),
        functions("torch.compiler", "disable", "is_compiling"),
    ),
    "deepspeed.runtime.eigenvalue": stubs(COMPRESS, "Eigenvalue"),
    "deepspeed.runtime.progressive_layer_drop": stubs(DATA, "ProgressiveLayerDrop"),
    "deepspeed.runtime.quantize": stubs(COMPRESS, "Quantizer"),
    "deepspeed.runtime.weight_quantizer": stubs(COMPRESS, "WeightQuantization"),
    "deepspeed.runtime.state_dict_factory": stubs(INFERENCE, "SDLoaderFactory SDLoaderBase MegatronSDLoader"),
    "deepspeed.runtime.domino.transformer": stubs(
        TENSOR,
        "DominoTransformer DominoTransformerLayer TransformerModelParallel TransformerModuleParallel DominoBatching "
        "DominoUtil  LayerType ModelType AttnType AttnMaskType CoreAttention",
    ),
    "deepspeed.runtime.checkpoint_engine": stubs(
        _ENGINES,
        "CheckpointEngine TorchCheckpointEngine FastCheckpointEngine DecoupledCheckpointEngine "
        "create_checkpoint_engine CheckpointCommitInfo",
    ),
    "deepspeed.runtime.checkpoint_engine.checkpoint_engine": stubs(_ENGINES, "CheckpointEngine CheckpointCommitInfo"),
    "deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine": stubs(
        _ENGINES, "TorchCheckpointEngine CheckpointEngine"
    ),
    "deepspeed.runtime.checkpoint_engine.fast_checkpoint_engine": stubs(_ENGINES, "FastCheckpointEngine"),
    "deepspeed.runtime.checkpoint_engine.decoupled_checkpoint_engine": stubs(_ENGINES, "DecoupledCheckpointEngine"),
    "deepspeed.runtime.checkpoint_engine.nebula_checkpoint_engine": stubs(_ENGINES, "NebulaCheckpointEngine"),
    "deepspeed.nebula.config": stubs(_ENGINES, "DeepSpeedNebulaConfig"),
    "deepspeed.runtime.comm.nccl": stubs(_ONEBIT, "NcclBackend"),
    "deepspeed.runtime.comm.mpi": stubs(_ONEBIT, "MpiBackend"),
    "deepspeed.runtime.comm.compressed": stubs(_ONEBIT, "CompressedBackend"),
    "deepspeed.runtime.comm.coalesced_collectives": stubs(
        INNER, "reduce_scatter_coalesced all_to_all_quant_reduce all_to_all_loco_quant_reduce"
    ),
    "deepspeed.runtime.swap_tensor": stubs(SWAPPERS, "MIN_SWAPPABLE_BYTES"),
    "deepspeed.runtime.swap_tensor.utils": stubs(
        SWAPPERS,
        "MIN_SWAPPABLE_BYTES MIN_AIO_BYTES AIO_ALIGNED_BYTES SwapBuffer SwapBufferPool SwapBufferManager "
        "swap_in_tensors swap_out_tensors get_sized_buffer get_sized_buffers print_object",
    ),
    "deepspeed.runtime.swap_tensor.constants": values(
        f"{_ADAPT}.keys",
        *("AIO", "AIO_BLOCK_SIZE", "AIO_QUEUE_DEPTH", "AIO_THREAD_COUNT", "AIO_INTRA_OP_PARALLELISM"),
        *("AIO_SINGLE_SUBMIT", "AIO_OVERLAP_EVENTS", "AIO_USE_GDS"),
    ),
    "deepspeed.runtime.swap_tensor.partitioned_param_swapper": stubs(
        SWAPPERS, "AsyncPartitionedParameterSwapper PartitionedParamStatus"
    ),
    "deepspeed.runtime.swap_tensor.partitioned_optimizer_swapper": stubs(SWAPPERS, "PartitionedOptimizerSwapper"),
    "deepspeed.runtime.swap_tensor.pipelined_optimizer_swapper": stubs(SWAPPERS, "PipelinedOptimizerSwapper"),
    "deepspeed.runtime.tensor_parallel": merge(
        classes("shardwise.config.schema.parallel", "TPTrainingConfig = TensorParallel"),
        stubs(TENSOR, "AUTOTP_MODE:class TpTrainingManager"),
    ),
    "deepspeed.runtime.tensor_parallel.config": merge(
        classes("shardwise.config.schema.parallel", "TPTrainingConfig = TensorParallel", "TPConfig = TPSize"),
        stubs(TENSOR, "AUTOTP_MODE:class resolve_tp_config _get_hf_tp_plan"),
    ),
    "deepspeed.runtime.tensor_parallel.init_utils": functions(f"{_ADAPT}.configuration", "load_ds_config"),
    "deepspeed.runtime.tensor_parallel.layers": stubs(TENSOR, "ColumnParallelLinear RowParallelLinear"),
    "deepspeed.runtime.data_pipeline.data_sampling.data_analyzer": stubs(DATA, "DataAnalyzer DistributedDataAnalyzer"),
    "deepspeed.runtime.data_pipeline.constants": stubs(
        DATA,
        "DATA_EFFICIENCY DATA_SAMPLING DATA_SAMPLING_ENABLED DATA_ROUTING CURRICULUM_LEARNING "
        "CURRICULUM_LEARNING_ENABLED CURRICULUM_LEARNING_CLUSTER_PATH DATA_SAMPLING_NUM_WORKERS RANDOM_LTD "
        "RANDOM_LTD_ENABLED",
    ),
    "deepspeed.runtime.data_pipeline.data_sampling.data_sampler": stubs(DATA, "DeepSpeedDataSampler"),
    "deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset": stubs(
        DATA,
        "IndexedDataset IndexedCachedDataset IndexedDatasetBuilder MMapIndexedDataset MMapIndexedDatasetBuilder "
        "make_builder make_dataset data_file_path index_file_path best_fitting_dtype valid_dtypes:value",
    ),
    "deepspeed.runtime.data_pipeline.data_sampling.utils": stubs(DATA, "split_index split_dataset find_fit_int_dtype"),
    "deepspeed.runtime.data_pipeline.data_sampling.variable_batch_size_and_lr": stubs(
        DATA,
        "get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed batch_by_seqlens scale_lr "
        "dataloader_for_variable_batch_size lr_scheduler_for_variable_batch_size VariableBatchSizeLR",
    ),
    "deepspeed.runtime.data_pipeline.data_routing.basic_layer": stubs(DATA, "RandomLayerTokenDrop"),
    "deepspeed.runtime.data_pipeline.data_routing.helper": stubs(
        DATA, "convert_to_random_ltd save_without_random_ltd remove_random_ltd_state_dict"
    ),
    "deepspeed.runtime.data_pipeline.data_routing.scheduler": stubs(DATA, "RandomLTDScheduler"),
    "deepspeed.runtime.data_pipeline.curriculum_scheduler": stubs(DATA, "CurriculumScheduler"),
    # -- activation checkpointing and parallelism ---------------------------------------------------------------------
    "deepspeed.checkpointing": _CHECKPOINTING,
    "deepspeed.runtime.activation_checkpointing.checkpointing": _CHECKPOINTING,
    "deepspeed.runtime.activation_checkpointing.offload_activations": stubs(
        "activations live on the host inside of shardwise.offload_activations(), or by the configuration's "
        "activation_checkpointing.cpu_checkpointing or activation_offload",
        "CheckpointHiddenStatesOffload get_checkpoint_hidden_states_offloading_ctx_manager",
    ),
    "deepspeed.pipe": merge(_PIPELINE_MODULE, _TOPOLOGY),
    "deepspeed.runtime.pipe": merge(_PIPELINE_MODULE, _TOPOLOGY),
    "deepspeed.runtime.pipe.module": merge(_PIPELINE_MODULE, classes("shardwise.errors", "PipelineError")),
    "deepspeed.runtime.pipe.engine": merge(
        _ENGINE,
        _PIPELINE_ENGINE,
        stubs(
            PIPELINE,
            "TRAIN_BATCH_TIMER BATCH_INPUT_TIMER PIPE_SEND_OUTPUT_TIMER PIPE_RECV_INPUT_TIMER "
            "PIPE_SEND_GRAD_TIMER PIPE_RECV_GRAD_TIMER _tensor_bytes",
        ),
    ),
    "deepspeed.runtime.pipe.topology": merge(
        _TOPOLOGY,
        classes("shardwise.pipe", "PipeDataParallelTopology", "PipeModelDataParallelTopology", "PipelineParallelGrid"),
    ),
    "deepspeed.runtime.pipe.schedule": stubs(
        PIPELINE,
        "PipeSchedule TrainSchedule InferenceSchedule DataParallelSchedule PipeInstruction BufferOpInstruction "
        "OptimizerStep ReduceGrads ReduceTiedGrads LoadMicroBatch ForwardPass BackwardPass SendActivation "
        "RecvActivation SendGrad RecvGrad",
    ),
    "deepspeed.runtime.pipe.p2p": stubs(
        PIPELINE,
        "init_process_groups can_send_recv send recv wait send_obj recv_obj _is_valid_send_recv _get_send_recv_group",
    ),
    "deepspeed.runtime.sequence_parallel.ulysses_sp": merge(
        classes(
            f"{_ADAPT}.sequences",
            "UlyssesSPAttentionHF",
            "UlyssesSPDataLoaderAdapter(dl, sp_rank, sp_group, sp_world_size, device)",
            "SequenceTiledCompute",
            "TiledMLP",
            "TiledFusedLogitsLoss",
        ),
        functions(
            "shardwise.parallel",
            "sequence_tiled_compute(fn, seqlen, shards, kwargs_to_shard, kwargs_to_pass, grad_requiring_tensor_key, "
            "compute_params=None, output_unshard_dimension=1, output_reduction='mean')",
        ),
    ),
    "deepspeed.runtime.sequence_parallel.parallel_state_sp": functions(
        f"{_ADAPT}.sequences",
        "initialize_sequence_parallel(sequence_parallel_size)",
        "get_sequence_parallel_group()",
        "get_sequence_parallel_world_size()",
        "get_sequence_parallel_rank()",
    )
    | functions(
        f"{_ADAPT}.groups",
        *(f"get_model_parallel_{what}()" for what in ("group", "rank", "world_size")),
    ),
    "deepspeed.sequence.layer": merge(
        classes(
            "shardwise.parallel",
            "DistributedAttention(local_attention, sequence_process_group, scatter_idx=2, gather_idx=0, "
            "sp_stream=None)",
        ),
        stubs(INNER, "_SeqAllToAll _DimZeroAllToAll apply_rotary_pos_emb _rotate_half"),
    ),
    "deepspeed.sequence.cross_entropy": stubs(SHARED_VOCABULARY, "vocab_sequence_parallel_cross_entropy"),
    "deepspeed.sequence.fpdt_layer": stubs(
        FPDT,
        "FPDT_InputConstruct FPDT_Attention FPDT_FFN FPDT_LogitsLoss SequenceChunk "
        "_FPDTGPUOffloadingAttentionImpl_:class",
    ),
    "deepspeed.sequence.vocab_parallel_ops": stubs(
        SHARED_VOCABULARY, "vocab_parallel_entropy vocab_parallel_kl_div vocab_parallel_logprobs"
    ),
    "deepspeed.moe": _MOE,
    "deepspeed.moe.layer": _MOE,
    "deepspeed.moe.sharded_moe": stubs(
        "tokens are sorted here, without matrices of tokens and places; `shardwise.moe.gates` and `dispatch` do it",
        "MOELayer TopKGate top1gating top2gating topkgating gumbel_rsample einsum get_selected_experts _AllToAll "
        "_capacity _one_hot_to_float _top_idx MOE_TIMER TOPK_GATE_TIMER FIRST_ALLTOALL_TIMER SECOND_ALLTOALL_TIMER",
    ),
    "deepspeed.moe.experts": stubs("`shardwise.moe.experts` has another way to call them", "Experts"),
    "deepspeed.moe.mappings": stubs(TENSOR, "gather_tokens drop_tokens"),
    "deepspeed.moe.utils": functions(
        "shardwise.moe.utils",
        "has_moe_layers(m)",
        "is_moe_param(param)",
        "split_params_into_shared_and_expert_params(params)",
        "split_params_grads_into_shared_and_expert_params(group)",
        "split_params_into_different_moe_groups_for_optimizer(param_groups, max_group_size=178956971)",
        "is_moe_param_group(param_group)",
        "configure_moe_param_groups(model_parameters)",
    ),
    "deepspeed.module_inject": stubs(
        TENSOR,
        "replace_transformer_layer revert_transformer_layer ReplaceWithTensorSlicing GroupQuantizer "
        "EmbeddingLayer Normalize DSPolicy HFBertLayerPolicy",
    )
    | _DIVIDED,
    "deepspeed.module_inject.layers": merge(
        _DIVIDED,
        classes("shardwise.parallel.tensor.layers", "TensorParallel_Layer = Parallel"),
        functions(f"{_ADAPT}.tensors", "set_autotp_mode(training=False)", "is_autotp_training_mode()"),
        stubs(
            TENSOR,
            "LmHeadLinearAllreduce EmbeddingLayer Normalize OPTEmbedding DepthwiseConv1dLayer SubParamLinearLayer "
            "GatherReplacedLayerParams",
        ),
    ),
    "deepspeed.module_inject.auto_tp": stubs(TENSOR, "AutoTP Loading ReplaceWithTensorSlicing"),
    "deepspeed.module_inject.policy": stubs(TENSOR, "DSPolicy TransformerPolicy transpose"),
    "deepspeed.module_inject.replace_module": stubs(
        TENSOR,
        "replace_transformer_layer revert_transformer_layer replace_module ReplaceWithTensorSlicing GroupQuantizer "
        "generic_injection",
    ),
    "deepspeed.module_inject.replace_policy": stubs(
        TENSOR,
        "DSPolicy HFBertLayerPolicy HFGPT2LayerPolicy HFGPTNEOLayerPolicy HFGPTJLayerPolicy HFOPTLayerPolicy "
        "BLOOMLayerPolicy GPTNEOXLayerPolicy MegatronLayerPolicy LLAMALayerPolicy",
    ),
    "deepspeed.module_inject.tp_shard": stubs(
        TENSOR,
        "set_num_kv_heads set_num_attention_heads set_n_embd set_tp_grain_size get_num_kv_heads "
        "get_num_attention_heads get_n_embd get_shard_size get_shard_size_list AutoTPMeta",
    ),
    # -- optimizers and operators -------------------------------------------------------------------------------------
    "deepspeed.ops": values(
        f"{_ADAPT}.operators", "__compatible_ops__ = COMPATIBLE_OPS", "__installed_ops__ = COMPATIBLE_OPS"
    ),
    "deepspeed.ops.adam": merge(
        _FUSED_ADAM,
        _CPU_ADAM,
        stubs(ZENFLOW, "ZenFlowCPUAdam ZenFlowSelectiveAdamW ZenFlowSelectiveAdamW_stage3"),
    ),
    "deepspeed.ops.adam.fused_adam": _FUSED_ADAM,
    "deepspeed.ops.adam.cpu_adam": _CPU_ADAM,
    "deepspeed.ops.adagrad": _CPU_ADAGRAD,
    "deepspeed.ops.adagrad.cpu_adagrad": _CPU_ADAGRAD,
    "deepspeed.ops.lion": merge(_FUSED_LION, _CPU_LION),
    "deepspeed.ops.lion.fused_lion": _FUSED_LION,
    "deepspeed.ops.lion.cpu_lion": _CPU_LION,
    "deepspeed.ops.lamb": _FUSED_LAMB,
    "deepspeed.ops.lamb.fused_lamb": _FUSED_LAMB,
    "deepspeed.ops.aio": classes(f"{_ADAPT}.operators", "AsyncIOBuilder"),
    "deepspeed.ops.op_builder": merge(
        classes(
            f"{_ADAPT}.operators",
            "OpBuilder",
            *(
                f"{name}Builder"
                for name in (
                    *("AsyncIO", "CPUAdagrad", "CPUAdam", "CPULion", "DeepCompile", "EvoformerAttn", "FPQuantizer"),
                    *("FusedAdam", "FusedLamb", "FusedLion", "GDS", "Inference", "InferenceCore", "InferenceCutlass"),
                    *("PinMemory", "Quantizer", "RaggedOps", "RaggedUtils", "RandomLTD", "SparseAttn"),
                    *("SpatialInference", "StochasticTransformer", "Transformer", "Utils"),
                )
            ),
        ),
        stubs(OPS, "get_default_compute_capabilities __deepspeed__:value"),
    ),
    "deepspeed.ops.op_builder.builder": classes(f"{_ADAPT}.operators", "OpBuilder"),
    "deepspeed.ops.op_builder.async_io": classes(f"{_ADAPT}.operators", "AsyncIOBuilder"),
    "deepspeed.ops.op_builder.all_ops": values(f"{_ADAPT}.operators", "ALL_OPS"),
    "deepspeed.ops.sparse_attention": stubs(
        SPARSE,
        "SparsityConfig DenseSparsityConfig FixedSparsityConfig VariableSparsityConfig BigBirdSparsityConfig "
        "BSLongformerSparsityConfig LocalSlidingWindowSparsityConfig SparseSelfAttention BertSparseSelfAttention "
        "SparseAttentionUtils MatMul Softmax",
    ),
    "deepspeed.ops.transformer": merge(
        stubs(LAYERS, _TRANSFORMER),
        stubs(INFERENCE, "DeepSpeedTransformerInference DeepSpeedInferenceConfig DeepSpeedMoEInference"),
    ),
    "deepspeed.ops.transformer.inference": stubs(
        INFERENCE, "DeepSpeedTransformerInference DeepSpeedInferenceConfig DeepSpeedMoEInference"
    ),
    "deepspeed.ops.transformer.inference.config": stubs(INFERENCE, "DeepSpeedInferenceConfig"),
    "deepspeed.ops.transformer.inference.diffusers_attention": stubs(INFERENCE, "DeepSpeedDiffusersAttention"),
    "deepspeed.ops.transformer.inference.diffusers_transformer_block": stubs(
        INFERENCE, "DeepSpeedDiffusersTransformerBlock"
    ),
    "deepspeed.model_implementations": stubs(INFERENCE, "DeepSpeedTransformerInference DeepSpeedInferenceConfig"),
    "deepspeed.model_implementations.transformers.ds_transformer": stubs(INFERENCE, "DeepSpeedTransformerInference"),
    "deepspeed.model_implementations.transformers.ds_gpt": stubs(INFERENCE, "DeepSpeedGPTInference"),
    "deepspeed.model_implementations.transformers.ds_opt": stubs(INFERENCE, "DeepSpeedOPTInference"),
    "deepspeed.model_implementations.transformers.ds_bloom": stubs(INFERENCE, "DeepSpeedBloomInference"),
    "deepspeed.model_implementations.transformers.ds_llama2": stubs(INFERENCE, "DeepSpeedLlama2Inference"),
    "deepspeed.ops.fp_quantizer": stubs(LINEAR, "FP_Quantize Quantizer matmul_fp8"),
    "deepspeed.ops.quantizer": stubs(COMPRESS, "ds_quantizer"),
    "deepspeed.ops.random_ltd": missing(DATA, "*", _UNKNOWN),
    "deepspeed.ops.deepspeed4science": missing(
        LAYERS,
        "DS4Sci_EvoformerAttention",
        "OpenFold and Protenix call `find_spec`, others import it, and have attention of their own",
    ),
    "deepspeed.linear": stubs(
        LINEAR, "OptimizedLinear LoRAConfig QuantizationConfig QuantizedParameter QuantizedLinear Init init_lora"
    ),
    "deepspeed.linear.config": stubs(LINEAR, "LoRAConfig QuantizationConfig"),
    "deepspeed.linear.optimized_linear": stubs(LINEAR, "OptimizedLinear LoRAOptimizedLinear"),
    "deepspeed.linear.quantization": stubs(LINEAR, "QuantizedParameter QuantizedLinear"),
    # -- checkpoints --------------------------------------------------------------------------------------------------
    "deepspeed.checkpoint": merge(
        stubs(
            UNIVERSAL,
            "DeepSpeedCheckpoint ZeROCheckpoint enable_universal_checkpoint SubparamShape model_3d_desc:class "
            "reshape_meg_2d_parallel load_hp_checkpoint_state WHOLE_PARAM_OPTIMIZER_STATES",
        ),
        _CHECKPOINT_KEYS,
    ),
    "deepspeed.checkpoint.constants": _CHECKPOINT_KEYS,
    "deepspeed.checkpoint.utils": merge(
        functions(f"{_ADAPT}.helpers", "clone_tensors_for_torch_save(item, device=...)"),
        stubs(FILES, "get_model_ckpt_name_for_rank get_layer_ckpt_name_for_rank get_zero_ckpt_name_for_rank"),
    ),
    "deepspeed.checkpoint.deepspeed_checkpoint": stubs(UNIVERSAL, "DeepSpeedCheckpoint"),
    "deepspeed.checkpoint.universal_checkpoint": stubs(
        UNIVERSAL, "enable_universal_checkpoint load_hp_checkpoint_state SubparamShape"
    ),
    "deepspeed.checkpoint.ds_to_universal": stubs(UNIVERSAL, "main dp_index_to_str"),
    # -- everything else ----------------------------------------------------------------------------------------------
    "deepspeed.monitor.monitor": classes(
        f"{_ADAPT}.monitors",
        "MonitorMaster(monitor_config)",
        "Monitor(monitor_config)",
        "TensorBoardMonitor",
        "WandbMonitor",
        "csvMonitor",
        "CometMonitor",
    ),
    "deepspeed.monitor.config": merge(
        functions(f"{_ADAPT}.monitors", "get_monitor_config(param_dict)"),
        classes(f"{_ADAPT}.monitors", "DeepSpeedMonitorConfig"),
        classes(
            "shardwise.config.schema.observe",
            "TensorBoardConfig = TensorBoard",
            "WandbConfig = WandB",
            "CSVConfig = CSVMonitor",
            "CometConfig = Comet",
        ),
    ),
    "deepspeed.monitor.tensorboard": classes(f"{_ADAPT}.monitors", "TensorBoardMonitor"),
    "deepspeed.monitor.wandb": classes(f"{_ADAPT}.monitors", "WandbMonitor"),
    "deepspeed.monitor.csv_monitor": classes(f"{_ADAPT}.monitors", "csvMonitor"),
    "deepspeed.monitor.comet": classes(f"{_ADAPT}.monitors", "CometMonitor"),
    "deepspeed.profiling.flops_profiler": _FLOPS_PROFILER,
    "deepspeed.profiling.flops_profiler.profiler": _FLOPS_PROFILER,
    "deepspeed.compression": stubs(COMPRESS, "compression_scheduler"),
    "deepspeed.compression.compress": stubs(COMPRESS, "init_compression redundancy_clean student_initialization"),
    "deepspeed.compression.helper": merge(
        functions(
            f"{_ADAPT}.helpers",
            "recursive_getattr(model, module_name)",
            "recursive_setattr(model, module_name, module)",
        ),
        stubs(COMPRESS, "convert_conv1d_to_linear module_replacement"),
    ),
    "deepspeed.elasticity": stubs(
        ELASTIC, "compute_elastic_config elasticity_enabled ensure_immutable_elastic_config DSElasticAgent"
    ),
    "deepspeed.elasticity.elastic_agent": stubs(ELASTIC, "DSElasticAgent"),
    "deepspeed.elasticity.elasticity": stubs(ELASTIC, "compute_elastic_config elasticity_enabled"),
    "deepspeed.elasticity.config": stubs(
        ELASTIC,
        "ElasticityConfig ElasticityError ElasticityConfigError ElasticityIncompatibleWorldSize:exception",
    ),
    "deepspeed.autotuning": stubs(AUTOTUNER, "Autotuner"),
    "deepspeed.autotuning.autotuner": stubs(AUTOTUNER, "Autotuner"),
    "deepspeed.autotuning.scheduler": stubs(AUTOTUNER, "ResourceManager"),
    "deepspeed.autotuning.config": stubs(AUTOTUNER, "DeepSpeedAutotuningConfig"),
    "deepspeed.autotuning.utils": stubs(AUTOTUNER, "write_experiments"),
    "deepspeed.inference": stubs(
        INFERENCE,
        "InferenceEngine build_hf_engine build_engine_from_ds_checkpoint InferenceEngineV2 "
        "RaggedInferenceEngineConfig DeepSpeedTPConfig",
    ),
    "deepspeed.inference.engine": stubs(INFERENCE, "InferenceEngine"),
    "deepspeed.inference.config": stubs(INFERENCE, "DeepSpeedInferenceConfig DeepSpeedTPConfig DtypeEnum"),
    "deepspeed.inference.v2": stubs(
        INFERENCE, "InferenceEngineV2 RaggedInferenceEngineConfig build_hf_engine build_engine_from_ds_checkpoint"
    ),
    "deepspeed.inference.v2.ragged": stubs(INFERENCE, "DSStateManager DSStateManagerConfig RaggedBatchWrapper"),
    "deepspeed.inference.v2.inference_utils": stubs(INFERENCE, "ActivationType DtypeEnum NormTypeEnum ceil_div"),
    "deepspeed.io": stubs(WRITERS, "MockFileWriter PyFileWriter FastFileWriter FastFileWriterConfig"),
    "deepspeed.nvme": missing(TUNING, "*", _UNKNOWN),
    "deepspeed.compile": missing(
        "compiler passes are not built yet; engine.compile() uses torch.compile", "*", _UNKNOWN
    ),
    "deepspeed.model_implementations.diffusers": missing(INFERENCE, "*", _UNKNOWN),
    "deepspeed.module_inject.containers": missing(TENSOR, "*", _UNKNOWN),
    "deepspeed.runtime.superoffload": missing(WRAPPERS, "*", _UNKNOWN),
    "deepspeed.runtime.zenflow": missing(ZENFLOW, "*", _UNKNOWN),
    "deepspeed.runtime.zero.stage1": missing(WRAPPERS, "*", _OLD),
    "deepspeed.runtime.zero.stage2": missing(WRAPPERS, "*", _OLD),
    "deepspeed.runtime.csr_tensor": missing("it is `deepspeed.runtime.sparse_tensor` since 2021", "*", _OLD),
    "deepspeed.pt": missing("its names are in `deepspeed.runtime` and `deepspeed.utils` since 2020", "*", _OLD),
    "deepspeed.launcher.runner": merge(
        functions("shardwise.dropin.launcher", "main(args=None)", "fetch_hostfile(hostfile_path)"),
        values("shardwise.dropin.launcher", "DEEPSPEED_ENVIRONMENT_NAME"),
        values(f"{_ADAPT}.keys", "DLTS_HOSTFILE"),
        stubs(_ONE_MACHINE, "EXPORT_ENVS parse_args parse_inclusion_exclusion parse_resource_filter encode_world_info"),
    ),
    "deepspeed.launcher.constants": values(
        f"{_ADAPT}.keys",
        *("PDSH_LAUNCHER", "OPENMPI_LAUNCHER", "MVAPICH_LAUNCHER", "SLURM_LAUNCHER", "MPICH_LAUNCHER"),
        "IMPI_LAUNCHER",
    ),
    "deepspeed.launcher.multinode_runner": stubs(
        _ONE_MACHINE,
        "MultiNodeRunner PDSHRunner OpenMPIRunner MVAPICHRunner SlurmRunner MPICHRunner IMPIRunner",
    ),
    "deepspeed.launcher.launch": stubs("`shardwise run` starts the processes itself", "main"),
    "deepspeed.env_report": functions("shardwise.dropin.commands", "main(args=None) = report"),
}
"""Module path -> name -> entry. A module without a served name does not exist; importing it raises with its reason."""

_REASONS = (
    ("deepspeed.checkpoint", UNIVERSAL),
    ("deepspeed.comm", _BACKENDS),
    ("deepspeed.compression", COMPRESS),
    ("deepspeed.elasticity", ELASTIC),
    ("deepspeed.inference", INFERENCE),
    ("deepspeed.io", WRITERS),
    ("deepspeed.launcher", _ONE_MACHINE),
    ("deepspeed.linear", LINEAR),
    ("deepspeed.module_inject", TENSOR),
    ("deepspeed.ops.sparse_attention", SPARSE),
    ("deepspeed.ops.transformer", LAYERS),
    ("deepspeed.runtime.checkpoint_engine", _ENGINES),
    ("deepspeed.runtime.data_pipeline", DATA),
    ("deepspeed.runtime.model_checkpointing", WRITERS),
    ("deepspeed.runtime.pipe", PIPELINE),
    ("deepspeed.runtime.swap_tensor", SWAPPERS),
    ("deepspeed.runtime.zero", WRAPPERS),
    ("deepspeed.sequence", SHARED_VOCABULARY),
)
"""Prefix of a module's path -> why it has no more names than `TABLE`; other modules have private parts."""

for _path, _names in INNER_NAMES.items():
    _why = next((text for start, text in _REASONS if _path.startswith(start)), INNER)
    TABLE[_path] = merge(TABLE.get(_path, {}), stubs(_why, _names))

MAINS: dict[str, str] = {
    "deepspeed.launcher.runner": "shardwise.dropin.launcher:main",
    "deepspeed.env_report": "shardwise.dropin.commands:report",
    "deepspeed.utils.zero_to_fp32": "shardwise.utils.zero_to_fp32:main",
}
"""Modules for `python -m`, and the functions that they run."""
