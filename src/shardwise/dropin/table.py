"""Every module path and public name of DeepSpeed 0.19, and what it is here.

One block a module: names of functions, classes and values under the module of shardwise that has them, with the
arguments that scripts may rely on; other names of modules; and names that are absent, with the reason ("*": the whole
module). A feature that is built moves its names from `absent` to the others, and changes nothing else. What stands in
docs/compatibility.md is made from this.
"""

from __future__ import annotations

from shardwise.absent import (
    AUTOTUNER,
    COMPILER,
    COMPRESS,
    DATA,
    ELASTIC,
    FILES,
    HYBRID,
    INFERENCE,
    INNER,
    LAYERS,
    LINEAR,
    MESH,
    MOE,
    MONITOR,
    OFFLOAD,
    OPS,
    PIPELINE,
    PROFILER,
    SEQUENCE,
    SPARSE,
    TENSOR,
    TILED,
    UNIVERSAL,
)
from shardwise.dropin.entries import Entry, absent, classes, functions, joined, modules, values

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
_LOGGING = joined(
    functions(
        f"{_ADAPT}.logs",
        "log_dist(message, ranks=None, level=20)",
        "log_dist_once",
        "set_log_level_from_string",
    ),
    values(f"{_ADAPT}.logs", "logger"),
)
_ACCELERATOR = functions(f"{_ADAPT}.accelerator", "get_accelerator()")
_ON_DEVICE = classes(f"{_ADAPT}.building", "OnDevice(dtype, device='meta', enabled=True)")
_LEAVES = functions(
    "shardwise.zero.leaves",
    "set_z3_leaf_modules(model, classes_or_names, raise_if_not_found=True)",
    "unset_z3_leaf_modules",
    "get_z3_leaf_modules",
    "set_z3_leaf_module(model, flag)",
    "z3_leaf_module",
)
_REPEATING = classes("shardwise.data", "RepeatingLoader(loader)")
_CONFIG = joined(
    classes(f"{_ADAPT}.configuration", "DeepSpeedConfig"),
    classes("shardwise.errors", "DeepSpeedConfigError = ConfigError"),
)
_OPTIMIZER = classes(f"{_ADAPT}.engine_optimizer", "DeepSpeedOptimizer")
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
_EXTERNAL = functions("shardwise.zero", "register_external_parameter(module, parameter)")
_UNREGISTER = functions("shardwise.zero", "unregister_external_parameter(module, parameter)")
_STATUS = classes("shardwise.zero.status", "ZeroParamStatus")
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
_COLLECTIVE = "group=None, async_op=False, prof=False, log_name=None, debug=None)"
_COMM = joined(
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
        "is_initialized()",
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
    functions("shardwise.comm.setup", _INIT_DISTRIBUTED),
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
    absent(MESH, "initialize_mesh_device"),
    absent(
        "it is one of DeepSpeed's own backends: torch.distributed's process groups are used as they are",
        "set_backend init_deepspeed_backend TorchBackend cdb enable_symm_mem_for_group",
    ),
    absent(
        "init_distributed() finds the place of a process under Open MPI, Slurm and so on by itself",
        "mpi_discovery in_aml in_aws_sm in_dlts",
    ),
)
_ZERO = joined(
    _INIT,
    _GATHERED,
    _EXTERNAL,
    _STATUS,
    absent(TILED, "TiledLinear TiledLinearReturnBias"),
    absent("sharding within groups of ranks is not built yet", "MiCS_Init"),
    absent(INNER, "DeepSpeedZeRoOffload DeepSpeedTensorOverride ZeroParamType"),
    functions(f"{_ADAPT}.building", "unwrap_model_for_generation"),
)
_GROUPS = joined(
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
    values(f"{_ADAPT}.groups", "mpu", "mesh_device"),
    absent(
        MOE,
        "_get_expert_parallel_group _get_expert_parallel_rank _get_expert_parallel_world_size "
        "_get_expert_data_parallel_group _get_expert_data_parallel_rank _get_expert_data_parallel_world_size "
        "_get_max_expert_size _get_max_expert_size_name",
    ),
    absent(
        "it is set by zero_optimization.zero_hpz_partition_size, and is the engine's own",
        "_get_zero_param_intra_parallel_group _get_zero_param_parallel_group",
    ),
    absent(TENSOR, "set_tensor_parallel_group set_tensor_parallel_rank set_tensor_parallel_world_size"),
    absent(TENSOR, "set_model_parallel_group set_model_parallel_rank set_model_parallel_world_size"),
    absent(
        "the engine's group is that of `mpu`, or all ranks; it is not set",
        "set_data_parallel_group set_data_parallel_rank set_data_parallel_world_size",
    ),
)
_COMMS_LOGGING = joined(
    classes("shardwise.comm.logger", "CommsLogger"),
    functions(f"{_ADAPT}.collectives", "calc_bw_log", "convert_size"),
)
_DEBUG = joined(
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
    ),
    absent("safe_get_full_grad and safe_set_full_grad change gradients one by one", "safe_update_full_grad_vectorized"),
    absent(
        INNER,
        "get_full_hp_param set_full_hp_param get_full_hp_grad set_full_hp_grad get_hp_fragment_mapping "
        "fragment_address tensor_fragment map_to_flat_opt_states link_hp_params lazy_init_hp_params_optimizer_state",
    ),
)
_TUNING = functions("shardwise.schedules", "add_tuning_arguments(parser)")
_CHECKPOINTING = joined(
    functions(
        "shardwise.recompute",
        "configure(mpu_, deepspeed_config=None, partition_activations=None, contiguous_checkpointing=None, "
        "num_checkpoints=None, checkpoint_in_cpu=None, synchronize=None, profile=None)",
        "is_configured()",
        "reset()",
        "partition_activations_in_checkpoint(partition_activation)",
        "checkpoint(function, *args, **kwargs)",
        "non_reentrant_checkpoint(function, *args)",
    ),
    absent(
        TENSOR,
        "get_cuda_rng_tracker CudaRNGStatesTracker model_parallel_cuda_manual_seed model_parallel_reconfigure_tp_seed "
        "gather_partitioned_activations extract_tensors merge_tensors",
    ),
    absent("saved inputs are in no buffer that would have to be sized", "set_num_layers"),
    absent("checkpoint() is torch's non-reentrant one, which has no autograd function", "CheckpointFunction"),
)
_TRANSFORMER = "DeepSpeedTransformerLayer DeepSpeedTransformerConfig"
_PIPELINE_MODULE = absent(PIPELINE, "PipelineModule LayerSpec TiedLayerSpec")

TABLE: dict[str, dict[str, Entry]] = {
    "deepspeed": joined(
        functions("shardwise.engine", f"initialize{_INITIALIZE}", f"initialize_engine{_INITIALIZE} = initialize"),
        functions("shardwise.comm.setup", _INIT_DISTRIBUTED),
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
        absent(PIPELINE, "PipelineModule PipelineEngine DualPipeVEngine DualPipeVModule"),
        absent(INFERENCE, "init_inference default_inference_config InferenceEngine DeepSpeedInferenceConfig"),
        absent(HYBRID, "DeepSpeedHybridEngine"),
        absent(
            TENSOR, "tp_model_init set_autotp_mode merge_tp_model_init_into_config record_tp_model_init_args domino"
        ),
        absent(LAYERS, f"{_TRANSFORMER} replace_transformer_layer revert_transformer_layer"),
        absent(COMPILER, "is_compile_supported"),
        absent("Muon finds the matrices that it steps by itself", "set_optimizer_flags"),
    ),
    "deepspeed.git_version_info": values("shardwise.dropin.version", "version", "git_hash", "git_branch"),
    "deepspeed.constants": values(f"{_ADAPT}.constants", "TORCH_DISTRIBUTED_DEFAULT_PORT"),
    # -- communication ------------------------------------------------------------------------------------------------
    "deepspeed.comm": _COMM,
    "deepspeed.comm.comm": _COMM,
    "deepspeed.accelerator": joined(
        _ACCELERATOR,
        functions(f"{_ADAPT}.accelerator", "set_accelerator", "is_current_accelerator_supported"),
        classes(f"{_ADAPT}.accelerator", "DeepSpeedAccelerator = Accelerator"),
    ),
    # -- utilities ----------------------------------------------------------------------------------------------------
    "deepspeed.utils": joined(
        _LOGGING,
        _GROUPS,
        _DEBUG,
        _LEAVES,
        _REPEATING,
        _ON_DEVICE,
        functions(f"{_ADAPT}.collectives", "is_initialized()"),
        absent(PROFILER, "instrument_w_nvtx"),
        absent(
            "modules are matched by class or name (set_z3_leaf_modules), or by zero_optimization.leaf_module",
            "set_z3_leaf_modules_by_name set_z3_leaf_modules_by_suffix",
        ),
        absent("leaves are modules here, not parameters", "z3_leaf_parameter"),
        absent(INNER, "get_caller_func"),
        absent("binding processes to cores is not built yet", "get_numactl_cmd"),
    ),
    "deepspeed.utils.logging": joined(
        _LOGGING,
        functions(
            f"{_ADAPT}.logs",
            "print_dist",
            "print_json_dist",
            "should_log_le",
            "get_current_level",
        ),
        classes(f"{_ADAPT}.logs", "LoggerFactory"),
        absent("`shardwise check` prints configurations", "print_configuration"),
    ),
    "deepspeed.utils.groups": _GROUPS,
    "deepspeed.utils.comms_logging": _COMMS_LOGGING,
    "deepspeed.utils.init_on_device": _ON_DEVICE,
    "deepspeed.utils.torch": functions(
        f"{_ADAPT}.helpers", "required_torch_version(min_version=None, max_version=None)"
    ),
    "deepspeed.utils.exceptions": absent("nothing raises it", "DeprecatedException"),
    "deepspeed.utils.timer": absent(PROFILER, "SynchronizedWallClockTimer ThroughputTimer NoopTimer trim_mean"),
    "deepspeed.utils.nvtx": absent(PROFILER, "instrument_w_nvtx"),
    "deepspeed.utils.numa": absent("binding processes to cores is not built yet", "get_numactl_cmd"),
    "deepspeed.utils.types": absent(INFERENCE, "ActivationFuncType NormType"),
    "deepspeed.utils.bwc": absent(TENSOR, "*"),
    "deepspeed.utils.zero_to_fp32": joined(
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
        absent(FILES, "get_model_state_files parse_model_states parse_optim_states"),
    ),
    # -- ZeRO ---------------------------------------------------------------------------------------------------------
    "deepspeed.runtime.zero": _ZERO,
    "deepspeed.runtime.zero.partition_parameters": joined(
        _ZERO,
        _UNREGISTER,
        _ACCELERATOR,
        functions(
            f"{_ADAPT}.building",
            "zero_wrapper_for_fp_tensor_constructor",
        ),
        values(f"{_ADAPT}.building", "_orig_torch_arange"),
        absent("initialize() suspends an open zero.Init by itself", "shutdown_init_context restore_init_context"),
    ),
    "deepspeed.runtime.zero.parameter_offload": absent(INNER, "DeepSpeedZeRoOffload"),
    "deepspeed.runtime.zero.stage3": joined(_ESTIMATE_3, absent(INNER, "DeepSpeedZeroOptimizer_Stage3")),
    "deepspeed.runtime.zero.stage_1_and_2": joined(_ESTIMATE_2, absent(INNER, "DeepSpeedZeroOptimizer")),
    "deepspeed.runtime.zero.config": joined(
        classes("shardwise.config.schema", "DeepSpeedZeroConfig = ZeroConfig"),
        classes(f"{_ADAPT}.constants", "ZeroStageEnum"),
    ),
    "deepspeed.runtime.zero.offload_config": joined(
        classes(f"{_ADAPT}.constants", "OffloadDeviceEnum"),
        classes("shardwise.config.schema.offload", "DeepSpeedZeroOffloadParamConfig = OffloadParam"),
        classes("shardwise.config.schema.offload", "DeepSpeedZeroOffloadOptimizerConfig = OffloadOptimizer"),
        absent(OFFLOAD, "OffloadStateTypeEnum"),
    ),
    "deepspeed.runtime.zero.offload_states": absent(OFFLOAD, "get_state_devices"),
    "deepspeed.runtime.zero.utils": joined(
        functions(f"{_ADAPT}.building", "is_zero_param"),
        functions(f"{_ADAPT}.engine_optimizer", "is_zero_supported_optimizer"),
        classes("shardwise.errors", "ZeRORuntimeException = ShardwiseError"),
    ),
    "deepspeed.runtime.zero.linear": absent(INNER, "LinearModuleForZeroStage3 zero3_linear_wrap"),
    # -- the engine and what it is made of ----------------------------------------------------------------------------
    "deepspeed.runtime.engine": joined(
        _ENGINE,
        values(f"{_ADAPT}.engine_optimizer", "DeepSpeedOptimizerCallable", "DeepSpeedSchedulerCallable"),
        absent(INNER, "MEMORY_OPT_ALLREDUCE_SIZE"),
    ),
    "deepspeed.runtime.base_optimizer": joined(
        _OPTIMIZER, absent("which stage an optimizer belongs to is its engine's business", "ZeROOptimizer")
    ),
    "deepspeed.runtime.config": joined(
        _CONFIG,
        values(
            f"{_ADAPT}.constants",
            *("ADAM_OPTIMIZER", "ADAMW_OPTIMIZER", "ADAGRAD_OPTIMIZER", "LAMB_OPTIMIZER", "LION_OPTIMIZER"),
            *("ONEBIT_ADAM_OPTIMIZER", "ONEBIT_LAMB_OPTIMIZER", "ZERO_ONE_ADAM_OPTIMIZER", "MUON_OPTIMIZER"),
            *("MUADAM_OPTIMIZER", "MUADAMW_OPTIMIZER", "MUSGD_OPTIMIZER", "DEEPSPEED_OPTIMIZERS"),
        ),
    ),
    "deepspeed.runtime.config_utils": classes("shardwise.config.schema", "DeepSpeedConfigModel = Section"),
    "deepspeed.runtime.constants": values(f"{_ADAPT}.constants", "ROUTE_TRAIN", "ROUTE_EVAL", "ROUTE_PREDICT"),
    "deepspeed.runtime.dataloader": joined(_LOADER, _REPEATING),
    "deepspeed.runtime.lr_schedules": joined(
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
    "deepspeed.runtime.utils": joined(
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
        absent(PIPELINE, "partition_uniform partition_balanced PartitionedTensor"),
        absent(TENSOR, "is_model_parallel_parameter"),
        absent("see_memory_usage prints what there is", "get_ma_status"),
        absent("CUDA graphs of optimizer kernels are not built", "graph_process"),
        absent(
            INNER,
            "get_flattened_grad_norm get_global_norm get_weight_norm CheckOverflow DummyOptim align_dense_tensors "
            "all_gather_dp_groups get_inactive_params",
        ),
    ),
    "deepspeed.runtime.fp16.fused_optimizer": absent(INNER, "FP16_Optimizer"),
    "deepspeed.runtime.fp16.unfused_optimizer": absent(INNER, "FP16_UnfusedOptimizer"),
    "deepspeed.runtime.fp16.loss_scaler": absent(
        "the loss scale is the engine's (engine.cur_scale, section fp16)",
        "LossScaler DynamicLossScaler CreateLossScaler",
    ),
    "deepspeed.runtime.bf16_optimizer": absent(INNER, "BF16_Optimizer"),
    "deepspeed.runtime.fp16.onebit": classes("shardwise.optim", "OnebitAdam", "OnebitLamb", "ZeroOneAdam"),
    "deepspeed.runtime.fp16.onebit.adam": classes("shardwise.optim", "OnebitAdam"),
    "deepspeed.runtime.fp16.onebit.lamb": classes("shardwise.optim", "OnebitLamb"),
    "deepspeed.runtime.fp16.onebit.zoadam": classes("shardwise.optim", "ZeroOneAdam"),
    "deepspeed.runtime.sparse_tensor": absent(
        "sparse gradients travel as rows inside the reduction (sparse_gradients)", "SparseTensor"
    ),
    "deepspeed.runtime.hybrid_engine": absent(HYBRID, "DeepSpeedHybridEngine"),
    "deepspeed.runtime.compiler": absent(COMPILER, "is_compile_supported"),
    "deepspeed.runtime.eigenvalue": absent(COMPRESS, "Eigenvalue"),
    "deepspeed.runtime.progressive_layer_drop": absent(DATA, "ProgressiveLayerDrop"),
    "deepspeed.runtime.quantize": absent(COMPRESS, "*"),
    "deepspeed.runtime.weight_quantizer": absent(COMPRESS, "*"),
    "deepspeed.runtime.state_dict_factory": absent(INFERENCE, "SDLoaderFactory"),
    "deepspeed.runtime.domino.transformer": absent(TENSOR, "DominoTransformer"),
    "deepspeed.runtime.checkpoint_engine": absent(
        "checkpoints are written by `shardwise.checkpoint`, which has no exchangeable engines",
        "CheckpointEngine TorchCheckpointEngine FastCheckpointEngine DecoupledCheckpointEngine "
        "create_checkpoint_engine CheckpointCommitInfo",
    ),
    "deepspeed.runtime.data_pipeline.data_sampling.data_analyzer": absent(DATA, "DataAnalyzer DistributedDataAnalyzer"),
    "deepspeed.runtime.data_pipeline.data_sampling.data_sampler": absent(DATA, "DeepSpeedDataSampler"),
    "deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset": absent(DATA, "*"),
    "deepspeed.runtime.data_pipeline.data_sampling.variable_batch_size_and_lr": absent(
        DATA, "get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed"
    ),
    "deepspeed.runtime.data_pipeline.data_routing.basic_layer": absent(DATA, "RandomLayerTokenDrop"),
    "deepspeed.runtime.data_pipeline.data_routing.helper": absent(
        DATA, "convert_to_random_ltd save_without_random_ltd remove_random_ltd_state_dict"
    ),
    "deepspeed.runtime.data_pipeline.data_routing.scheduler": absent(DATA, "RandomLTDScheduler"),
    "deepspeed.runtime.data_pipeline.curriculum_scheduler": absent(DATA, "CurriculumScheduler"),
    # -- activation checkpointing and parallelism ---------------------------------------------------------------------
    "deepspeed.checkpointing": _CHECKPOINTING,
    "deepspeed.runtime.activation_checkpointing.checkpointing": _CHECKPOINTING,
    "deepspeed.pipe": _PIPELINE_MODULE,
    "deepspeed.runtime.pipe": _PIPELINE_MODULE,
    "deepspeed.runtime.pipe.module": _PIPELINE_MODULE,
    "deepspeed.runtime.pipe.engine": absent(PIPELINE, "PipelineEngine"),
    "deepspeed.runtime.pipe.topology": absent(
        PIPELINE, "ProcessTopology PipeDataParallelTopology PipeModelDataParallelTopology PipelineParallelGrid"
    ),
    "deepspeed.runtime.pipe.schedule": absent(
        PIPELINE,
        "PipeSchedule TrainSchedule InferenceSchedule DataParallelSchedule OptimizerStep ReduceGrads ReduceTiedGrads "
        "LoadMicroBatch ForwardPass BackwardPass SendActivation RecvActivation SendGrad RecvGrad",
    ),
    "deepspeed.runtime.sequence_parallel.ulysses_sp": absent(
        SEQUENCE,
        "UlyssesSPAttentionHF UlyssesSPDataLoaderAdapter sequence_tiled_compute SequenceTiledCompute TiledMLP "
        "TiledFusedLogitsLoss",
    ),
    "deepspeed.runtime.sequence_parallel.parallel_state_sp": absent(SEQUENCE, "*"),
    "deepspeed.sequence.layer": absent(SEQUENCE, "DistributedAttention"),
    "deepspeed.sequence.cross_entropy": absent(SEQUENCE, "vocab_sequence_parallel_cross_entropy"),
    "deepspeed.sequence.fpdt_layer": absent(SEQUENCE, "*"),
    "deepspeed.moe.layer": absent(MOE, "MoE"),
    "deepspeed.moe.sharded_moe": absent(MOE, "MOELayer TopKGate top1gating top2gating topkgating"),
    "deepspeed.moe.experts": absent(MOE, "Experts"),
    "deepspeed.moe.mappings": absent(MOE, "gather_tokens drop_tokens"),
    "deepspeed.moe.utils": absent(
        MOE,
        "has_moe_layers is_moe_param split_params_into_shared_and_expert_params "
        "split_params_grads_into_shared_and_expert_params split_params_into_different_moe_groups_for_optimizer "
        "is_moe_param_group configure_moe_param_groups",
    ),
    "deepspeed.module_inject": absent(
        TENSOR, "replace_module replace_transformer_layer auto_tp layers policy tp_shard"
    ),
    # -- optimizers and operators -------------------------------------------------------------------------------------
    "deepspeed.ops.adam": joined(
        classes(
            f"{_ADAPT}.optimizers",
            "FusedAdam(params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, adam_w_mode=True, "
            "weight_decay=0.0, amsgrad=False, set_grad_none=True)",
            "DeepSpeedCPUAdam(model_params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, "
            "weight_decay=0.0, amsgrad=False, adamw_mode=True, fp32_optimizer_states=True)",
        ),
        absent(OFFLOAD, "ZenFlowCPUAdam ZenFlowSelectiveAdamW ZenFlowSelectiveAdamW_stage3"),
    ),
    "deepspeed.ops.adagrad": classes(
        f"{_ADAPT}.optimizers",
        "DeepSpeedCPUAdagrad(model_params, lr=1e-2, eps=1e-10, weight_decay=0.0, amsgrad=False, "
        "fp32_optimizer_states=True)",
    ),
    "deepspeed.ops.lion": classes(
        f"{_ADAPT}.optimizers",
        "FusedLion(params, lr=1e-3, betas=(0.9, 0.999), weight_decay=0.0, set_grad_none=True)",
        "DeepSpeedCPULion(model_params, lr=1e-3, betas=(0.9, 0.999), weight_decay=0.0, fp32_optimizer_states=True)",
    ),
    "deepspeed.ops.lamb": classes(
        "shardwise.optim",
        "FusedLamb(params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, eps_inside_sqrt=False, "
        "weight_decay=0.0, max_grad_norm=0.0, max_coeff=10.0, min_coeff=0.01, amsgrad=False) = Lamb",
    ),
    "deepspeed.ops.aio": classes(f"{_ADAPT}.operators", "AsyncIOBuilder"),
    "deepspeed.ops.op_builder": joined(
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
        absent(OPS, "get_default_compute_capabilities __deepspeed__"),
    ),
    "deepspeed.ops.op_builder.all_ops": values(f"{_ADAPT}.operators", "ALL_OPS"),
    "deepspeed.ops.sparse_attention": absent(
        SPARSE,
        "SparsityConfig DenseSparsityConfig FixedSparsityConfig VariableSparsityConfig BigBirdSparsityConfig "
        "BSLongformerSparsityConfig LocalSlidingWindowSparsityConfig SparseSelfAttention BertSparseSelfAttention "
        "SparseAttentionUtils MatMul Softmax",
    ),
    "deepspeed.ops.transformer": joined(
        absent(LAYERS, _TRANSFORMER),
        absent(INFERENCE, "DeepSpeedTransformerInference DeepSpeedInferenceConfig DeepSpeedMoEInference"),
    ),
    "deepspeed.ops.fp_quantizer": absent(LINEAR, "FP_Quantize Quantizer"),
    "deepspeed.ops.quantizer": absent(COMPRESS, "ds_quantizer"),
    "deepspeed.ops.random_ltd": absent(DATA, "*"),
    "deepspeed.ops.deepspeed4science": absent(LAYERS, "DS4Sci_EvoformerAttention"),
    "deepspeed.linear": absent(
        LINEAR, "OptimizedLinear LoRAConfig QuantizationConfig QuantizedParameter QuantizedLinear Init"
    ),
    # -- checkpoints --------------------------------------------------------------------------------------------------
    "deepspeed.checkpoint": absent(
        UNIVERSAL,
        "DeepSpeedCheckpoint ZeROCheckpoint enable_universal_checkpoint SubparamShape model_3d_desc "
        "reshape_meg_2d_parallel",
    ),
    "deepspeed.checkpoint.utils": functions(f"{_ADAPT}.helpers", "clone_tensors_for_torch_save(item, device=...)"),
    "deepspeed.checkpoint.ds_to_universal": absent(UNIVERSAL, "main"),
    # -- everything else ----------------------------------------------------------------------------------------------
    "deepspeed.monitor.monitor": absent(MONITOR, "MonitorMaster"),
    "deepspeed.monitor.config": absent(MONITOR, "get_monitor_config DeepSpeedMonitorConfig"),
    "deepspeed.profiling.flops_profiler": absent(
        PROFILER,
        "FlopsProfiler get_model_profile number_to_string macs_to_string flops_to_string bytes_to_string "
        "params_to_string duration_to_string get_module_flops get_module_macs get_module_duration",
    ),
    "deepspeed.compression.compress": absent(COMPRESS, "init_compression redundancy_clean student_initialization"),
    "deepspeed.compression.helper": absent(
        COMPRESS, "recursive_getattr recursive_setattr convert_conv1d_to_linear module_replacement"
    ),
    "deepspeed.elasticity": absent(
        ELASTIC, "compute_elastic_config elasticity_enabled ensure_immutable_elastic_config DSElasticAgent"
    ),
    "deepspeed.autotuning": absent(AUTOTUNER, "Autotuner"),
    "deepspeed.inference": absent(
        INFERENCE,
        "InferenceEngine build_hf_engine build_engine_from_ds_checkpoint InferenceEngineV2 "
        "RaggedInferenceEngineConfig DeepSpeedTPConfig",
    ),
    "deepspeed.inference.engine": absent(INFERENCE, "InferenceEngine"),
    "deepspeed.inference.config": absent(INFERENCE, "DeepSpeedInferenceConfig DeepSpeedTPConfig"),
    "deepspeed.io": absent(OFFLOAD, "MockFileWriter PyFileWriter FastFileWriter FastFileWriterConfig"),
    "deepspeed.nvme": absent(OFFLOAD, "*"),
    "deepspeed.launcher.runner": joined(
        functions("shardwise.dropin.launcher", "main(args=None)"),
        values("shardwise.dropin.launcher", "DEEPSPEED_ENVIRONMENT_NAME"),
    ),
    "deepspeed.launcher.launch": absent("`shardwise run` starts the processes itself", "main"),
    "deepspeed.env_report": functions("shardwise.dropin.commands", "main(args=None) = report"),
}
"""Module path -> name -> what it is. A module without a served name does not exist; its reason is told on import."""

MAINS: dict[str, str] = {
    "deepspeed.launcher.runner": "shardwise.dropin.launcher:main",
    "deepspeed.env_report": "shardwise.dropin.commands:report",
    "deepspeed.utils.zero_to_fp32": "shardwise.utils.zero_to_fp32:main",
}
"""Modules that `python -m` runs, and what it runs."""
