"""Further names of DeepSpeed's modules, all of them stubs; `table` has all other names."""

from __future__ import annotations

NAMES: dict[str, str] = {
    "deepspeed": "resolve_per_head_muon_after_sharding",
    "deepspeed.checkpoint.ds_to_universal": (
        "atoi dump_param_fragment extract_zero_shards extract_zero_shards_stage3 merge_tp_slices "
        "merge_zero3_slices natural_keys parse_arguments"
    ),
    "deepspeed.checkpoint.reshape_3d_utils": (
        "flatten_dp_dimension get_model_3d_descriptor get_model_3d_descriptor_from_metadata "
        "model_3d_desc:class unflatten_dp_dimension"
    ),
    "deepspeed.checkpoint.reshape_meg_2d": ("get_mpu_ranks meg_2d_parallel_map:class reshape reshape_meg_2d_parallel"),
    "deepspeed.checkpoint.reshape_utils": (
        "basic_folder_validation get_files get_files_with_prefix get_zero_files merge_state merge_state_dict "
        "merge_state_list partition_data sort_zero_files validate_files"
    ),
    "deepspeed.checkpoint.zero_checkpoint": "ZeROCheckpoint",
    "deepspeed.comm.backend": "Backend",
    "deepspeed.comm.ccl": "CCLBackend CCLHandler build_ccl_op",
    "deepspeed.comm.comm": "patch_aml_env_for_torch_nccl_backend patch_aws_sm_env_for_torch_nccl_backend timed_op",
    "deepspeed.comm.config": "CommsConfig CommsLoggerConfig DeepSpeedCommsConfig",
    "deepspeed.comm.mori": "allgather_into_tensor init is_enabled supports",
    "deepspeed.comm.pg_utils": "is_parallel",
    "deepspeed.comm.torch": (
        "Noop StagedWork all_gather_comm_off all_reduce_comm_off backward_comm_off broadcast_comm_off "
        "build_shm_op disable_compiler_collective known_world_size reduce_comm_off reduce_scatter_comm_off "
        "stage_on_cpu"
    ),
    "deepspeed.comm.utils": (
        "get_debug_log_name get_default_args get_local_rank_from_launcher get_msg_size_from_args "
        "get_tensor_kwarg get_tensor_position get_world_rank_from_launcher get_world_size_from_launcher"
    ),
    "deepspeed.compression.basic_layer": (
        "BNLayer_Compress ColumnParallelLinear_Compress Conv2dLayer_Compress Embedding_Compress "
        "LinearLayer_Compress QuantAct RowParallelLinear_Compress copy_to_model_parallel_region "
        "gather_from_model_parallel_region reduce_from_model_parallel_region scatter_to_model_parallel_region "
        "split_tensor_along_last_dim"
    ),
    "deepspeed.compression.compress": "check_deepspeed_config get_compress_methods get_module_name",
    "deepspeed.compression.config": (
        "get_activation_quantization get_activation_quantization_different_groups "
        "get_activation_quantization_shared_parameters get_channel_pruning "
        "get_channel_pruning_different_groups get_channel_pruning_shared_parameters get_compression_config "
        "get_head_pruning get_head_pruning_different_groups get_head_pruning_shared_parameters "
        "get_layer_reduction get_layer_reduction_enabled get_layer_reduction_params get_quantize_enabled "
        "get_row_pruning get_row_pruning_different_groups get_row_pruning_shared_parameters "
        "get_sparse_pruning get_sparse_pruning_different_groups get_sparse_pruning_shared_parameters "
        "get_weight_quantization get_weight_quantization_different_groups "
        "get_weight_quantization_shared_parameters"
    ),
    "deepspeed.compression.helper": (
        "compression_preparation fix_compression generate_pruners is_module_compressible "
        "register_on_step_begin rewrite_optimizer_step"
    ),
    "deepspeed.compression.scheduler": "compression_scheduler:class",
    "deepspeed.compression.utils": "AsymQuantizer BinaryQuantizer SymQuantizer TernaryQuantizer TopKBinarizer",
    "deepspeed.datastates.config": "DeepSpeedDataStatesConfig",
    "deepspeed.elasticity.elasticity": (
        "ensure_immutable_elastic_config get_best_candidates get_candidate_batch_sizes get_valid_gpus"
    ),
    "deepspeed.elasticity.utils": "is_torch_elastic_compatible",
    "deepspeed.env_report": (
        "cli_main debug_report get_shm_size human_readable_size installed_cann_path installed_cann_version "
        "ninja_installed nvcc_version op_report parse_arguments"
    ),
    "deepspeed.inference.config": (
        "ActivationQuantConfig BaseQuantConfig DeepSpeedMoEConfig InferenceCheckpointConfig MoETypeEnum "
        "QKVQuantConfig QuantTypeEnum QuantizationConfig WeightQuantConfig"
    ),
    "deepspeed.io.base_file_writer": "BaseFileWriter",
    "deepspeed.io.base_io_buffer": "Base_IO_Buffer",
    "deepspeed.io.double_io_buffer": "Double_IO_Buffer",
    "deepspeed.io.fast_file_writer": "FastFileWriter FastFileWriterConfig",
    "deepspeed.io.mock_file_writer": "MockFileWriter",
    "deepspeed.io.py_file_writer": "PyFileWriter",
    "deepspeed.io.single_io_buffer": "Single_IO_Buffer",
    "deepspeed.io.utils": (
        "bytes_to_tensor obj_serialization_details required_minimum_torch_version serialize_details:class "
        "tensor_to_bytes"
    ),
    "deepspeed.launcher.runner": (
        "apply_num_nodes_and_gpus parse_node_config parse_node_config_list parse_num_nodes run_autotuning"
    ),
    "deepspeed.linear.context_manager": "Init init_lora",
    "deepspeed.module_inject.auto_tp": "move",
    "deepspeed.module_inject.auto_tp_model_utils": (
        "build_bloom_alibi_tensor build_mpt_alibi_tensor build_mpt_atten_bias_tensor get_alibi_mask "
        "get_head_shard_sizes install_head_sharded_helper"
    ),
    "deepspeed.module_inject.autotp_config": (
        "AutoTPConfig AutoTPPresets PartitionType TPLayerSpec merge_autotp_configs"
    ),
    "deepspeed.module_inject.fusedqkv_utils": (
        "codegen_block_layout fused_qkv_subparam_sizes get_fused_qkv_type prepare_tp_fused_qkvw "
        "require_tp_fused_qkvw set_fused_qkv_shard_state shard_chunk_mlp shard_value_with_share_qk "
        "shared_qk_value_head_ids split_by_qkvlist_and_refuse"
    ),
    "deepspeed.module_inject.inject": "module_inject",
    "deepspeed.module_inject.layers": (
        "AsyncColumnParallel ColumnParallel Conv_LinearALlreduce FusedModuleWrapper GateUpPack_LinearLayer "
        "GatherFromTensorParallelRegion HiddenParallelEmbedding LinearAllreduceWithReplicatedInput "
        "RMSNormalize RowParallel ScatterToTensorParallelRegion SubParamColumnParallel "
        "SubParamLinearAllreduce TensorParallelConv2d TensorParallelIcShardConv2d TensorParallelOcShardConv2d "
        "VocabParallelEmbedding VocabParallelLinear Yuan_LinearAllreduce Yuan_LinearLayer add_bias "
        "collect_autotp_universal_checkpoint_info configure_tensor_parallel_runtime conv_LinearLayer:class "
        "fused_LinearLayer:class get_auto_tp_mode"
    ),
    "deepspeed.module_inject.load_checkpoint": "load_model_with_checkpoint",
    "deepspeed.module_inject.module_quantize": "quantize_module quantize_transformer_layer",
    "deepspeed.module_inject.policy": ("maybe_copy maybe_copy_geglu maybe_copy_qkv maybe_get_lora pack_lora_weights"),
    "deepspeed.module_inject.replace_module": "get_transformer_name skip_level_0_prefix",
    "deepspeed.module_inject.tp_plan_converter": "TPPlanConverter",
    "deepspeed.module_inject.utils": "policy_to_ds_container transpose",
    "deepspeed.moe.sharded_moe": "multiplicative_jitter",
    "deepspeed.monitor.comet": "EventsLogScheduler",
    "deepspeed.monitor.utils": "check_comet_availability check_tb_availability check_wandb_availability",
    "deepspeed.ops.adam.multi_tensor_apply": "MultiTensorApply",
    "deepspeed.ops.adam.zenflow_cpu_adam": "ZenFlowCPUAdam",
    "deepspeed.ops.adam.zenflow_torch_adam": "ZenFlowSelectiveAdamW ZenFlowSelectiveAdamW_stage3 adamw",
    "deepspeed.ops.fp_quantizer.fp8_gemm": "matmul_fp8 matmul_fp8_fallback",
    "deepspeed.ops.fp_quantizer.quantize": "FP_Quantize Quantizer",
    "deepspeed.ops.lion.multi_tensor_apply": "MultiTensorApply",
    "deepspeed.ops.op_builder": "builder_closure",
    "deepspeed.ops.quantizer.quantizer": "ds_quantizer",
    "deepspeed.ops.sparse_attention.bert_sparse_self_attention": "BertSparseSelfAttention",
    "deepspeed.ops.sparse_attention.sparse_attention_utils": "SparseAttentionUtils",
    "deepspeed.ops.sparse_attention.sparse_self_attention": "SparseSelfAttention",
    "deepspeed.ops.sparse_attention.sparsity_config": (
        "BSLongformerSparsityConfig BigBirdSparsityConfig DenseSparsityConfig FixedSparsityConfig "
        "LocalSlidingWindowSparsityConfig SparsityConfig VariableSparsityConfig"
    ),
    "deepspeed.ops.transformer.transformer": (
        "DeepSpeedTransformerConfig DeepSpeedTransformerFunction DeepSpeedTransformerLayer TransformerConfig"
    ),
    "deepspeed.profiling.config": "DeepSpeedFlopsProfilerConfig",
    "deepspeed.profiling.flops_profiler.profiler": "wrapFunc",
    "deepspeed.runtime.activation_checkpointing.checkpointing": (
        "get_cpu_activations_for_backward get_offloaded_activations_for_backward get_partition_size "
        "get_partition_start get_partitioned_activations_for_backward is_activation_to_checkpoint "
        "partition_activations restore_offloaded_activations"
    ),
    "deepspeed.runtime.activation_checkpointing.config": "DeepSpeedActivationCheckpointingConfig",
    "deepspeed.runtime.activation_checkpointing.offload_activations": (
        "CheckpointActivationOffloadStats patch_gradient_checkpointing_layer_marker"
    ),
    "deepspeed.runtime.bf16_optimizer": "print_rank_0",
    "deepspeed.runtime.checkpoint_engine.datastates_checkpoint_engine": "DataStatesCheckpointEngine",
    "deepspeed.runtime.checkpoint_engine.decoupled_checkpoint_engine": (
        "CheckpointSize DecoupledEvent init_decoupled_checkpoint"
    ),
    "deepspeed.runtime.checkpoint_engine.utils": "create_checkpoint_engine",
    "deepspeed.runtime.chunked_cross_entropy": (
        "ChunkedCausalLMLoss chunked_cross_entropy install_chunked_causal_lm_loss triton_backend_available"
    ),
    "deepspeed.runtime.compiler": (
        "compile compile_autoep_non_moe_regions compiled_autograd dummy_decorator enable lazy_disable"
    ),
    "deepspeed.runtime.config": (
        "DeepSpeedConfigWriter DtypeEnum HybridEngineConfig get_amp_enabled get_amp_params "
        "get_bfloat16_enabled get_bfloat16_immediate_grad_update get_checkpoint_parallel_write_pipeline "
        "get_checkpoint_params get_checkpoint_tag_validation_mode get_communication_data_type "
        "get_data_types_params get_dataloader_drop_last get_disable_allgather get_disable_python_gc "
        "get_dump_state get_dynamic_loss_scale_args get_eigenvalue_config get_eigenvalue_enabled "
        "get_eigenvalue_gas_boundary_resolution get_eigenvalue_layer_name get_eigenvalue_layer_num "
        "get_eigenvalue_max_iter get_eigenvalue_stability get_eigenvalue_tol get_eigenvalue_verbose "
        "get_expert_data_topo_config get_expert_parallel_config get_fp16_auto_cast get_fp16_enabled "
        "get_fp16_master_weights_and_grads_enabled get_gradient_accumulation_steps get_gradient_allreduce_op "
        "get_gradient_predivide_factor get_graph_harvesting get_hybrid_engine_config "
        "get_initial_dynamic_scale get_log_level get_loss_scale get_lower_precision_safe_modules "
        "get_managed_gradient_accumulation get_memory_breakdown get_optimizer_gradient_clipping "
        "get_optimizer_legacy_fusion get_optimizer_name get_optimizer_params get_pipeline_config "
        "get_pld_enabled get_pld_params get_prescale_gradients get_scheduler_name get_scheduler_params "
        "get_sparse_attention get_sparse_attention_mode get_sparse_attention_type get_sparse_bigbird_config "
        "get_sparse_bslongformer_config get_sparse_dense_config get_sparse_fixed_config "
        "get_sparse_gradients_enabled get_sparse_variable_config get_steps_per_print get_torch_autocast_dtype "
        "get_torch_autocast_enabled get_train_batch_size get_train_micro_batch_size_per_gpu "
        "get_wall_clock_breakdown get_zero_allow_untested_optimizer get_zero_force_ds_cpu_optimizer"
    ),
    "deepspeed.runtime.config_utils": "get_config_default",
    "deepspeed.runtime.constants": "ValidationMode",
    "deepspeed.runtime.data_pipeline.config": (
        "get_curriculum_enabled_legacy get_curriculum_learning get_curriculum_learning_enabled "
        "get_curriculum_learning_params get_curriculum_params_legacy get_data_efficiency_config "
        "get_data_efficiency_enabled get_data_efficiency_seed get_data_routing get_data_routing_enabled "
        "get_data_sampling get_data_sampling_enabled get_data_sampling_num_epochs "
        "get_data_sampling_num_workers get_data_sampling_pin_memory get_dynamic_batching get_random_ltd "
        "get_random_ltd_enabled get_random_ltd_params"
    ),
    "deepspeed.runtime.data_pipeline.data_routing.scheduler": "BaseScheduler",
    "deepspeed.runtime.data_pipeline.data_routing.utils": "bsh_decoder_gather bsh_decoder_scatter",
    "deepspeed.runtime.data_pipeline.data_sampling.data_analyzer": "Dist",
    "deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset": (
        "code create_doc_idx dataset_exists exscan_from_cumsum_ get_available_dataset_impl "
        "get_pointers_with_total infer_dataset_impl read_longs write_longs"
    ),
    "deepspeed.runtime.data_pipeline.data_sampling.utils": ("close_mmap_dataset_builder create_mmap_dataset_builder"),
    "deepspeed.runtime.data_pipeline.data_sampling.variable_batch_size_and_lr": (
        "get_dataloader_and_lr_scheduler_for_variable_batch_size"
    ),
    "deepspeed.runtime.domino.async_linear": (
        "DominoAsyncColumnParallelLinear DominoAsyncColumnParallelLinearImpl RowParallelLinearNoComm"
    ),
    "deepspeed.runtime.domino.transformer": "DominoModule NoOper ShardedAttention bias_dropout_add:class",
    "deepspeed.runtime.engine": "split_half_float_double_sparse",
    "deepspeed.runtime.fp16.loss_scaler": "LossScaleProfile LossScaleProfileDefaults to_python_float",
    "deepspeed.runtime.hybrid_engine_graph": (
        "DecodeGraphCache decode_steps_from_generate_kwargs validate_cuda_graph_support"
    ),
    "deepspeed.runtime.keep_in_fp32": "buffers_to_keep_in_fp32 keep_buffers_in_fp32 keep_in_fp32_pattern",
    "deepspeed.runtime.lr_schedules": (
        "override_1cycle_params override_lr_range_test_params override_warmupCosineLR_params override_warmupLR_params"
    ),
    "deepspeed.runtime.model_checkpointing.config": "get_checkpoint_config get_checkpoint_writer_config",
    "deepspeed.runtime.model_checkpointing.constants": ("CheckpointDataParallel CheckpointWriterType ValidationMode"),
    "deepspeed.runtime.model_checkpointing.data_parallel_writer_factory": (
        "DataParallelWriterConfig DataParallelWriterFactory"
    ),
    "deepspeed.runtime.model_checkpointing.utils": (
        "ExpertParallelInfo MPUInfo UniversalParallelInfo create_data_parallel_writer_config "
        "create_universal_parallel_info"
    ),
    "deepspeed.runtime.model_checkpointing.writer_factory": "CheckpointWriterFactory",
    "deepspeed.runtime.pipe.dualpipev": "DualPipeVEngine DualPipeVModule",
    "deepspeed.runtime.pipe.engine": "is_even",
    "deepspeed.runtime.pipe.schedule": "CommitP2P DualPipeVSchedule",
    "deepspeed.runtime.precision_config": "DeepSpeedBF16Config DeepSpeedFP16Config",
    "deepspeed.runtime.python_gc": "PythonGCManager",
    "deepspeed.runtime.sequence_parallel.parallel_state_sp": (
        "get_sequence_data_parallel_group get_sequence_data_parallel_rank get_sequence_data_parallel_world_size"
    ),
    "deepspeed.runtime.sequence_parallel.ulysses_sp": "AutogradComputeMLP",
    "deepspeed.runtime.swap_tensor.aio_config": "get_aio_config",
    "deepspeed.runtime.swap_tensor.async_swapper": "AsyncTensorSwapper",
    "deepspeed.runtime.swap_tensor.optimizer_utils": (
        "FlattenedTensorSwapInfo OptimizerStateSwapInfo OptimizerSwapper SwapTensorContext"
    ),
    "deepspeed.runtime.swap_tensor.partitioned_param_swapper": "print_rank_0",
    "deepspeed.runtime.swap_tensor.pipelined_optimizer_swapper": "OptimizerSwapOp",
    "deepspeed.runtime.tensor_parallel.config": "get_tensor_parallel_config",
    "deepspeed.runtime.tensor_parallel.init_utils": (
        "infer_config_dtype merge_tp_model_init_into_config record_tp_model_init_args tp_group_world_size"
    ),
    "deepspeed.runtime.tensor_parallel.tp_manager": "TpTrainingManager",
    "deepspeed.runtime.torch_autocast": (
        "autocast_if_enabled get_all_comm_dtypes get_autocast_dtype get_comm_dtype "
        "get_default_autocast_lower_precision_modules has_comm_dtype init_autocast_params "
        "is_autocast_initialized sort_dtypes"
    ),
    "deepspeed.runtime.utils": (
        "OutputBackwardHookManager TLinear all_gather_into_tensor_dp_groups "
        "check_internal_apis_for_count_used_parameters clip_tensors_by_global_norm combine_grad_norm_groups "
        "count_used_parameters_in_backward filter_empty_parameters get_checkpoint_folder_size "
        "get_global_norm_of_tensors get_grad_zeros get_norm_with_moe_layers get_norm_with_moe_layers_fast "
        "get_tensor_bytes is_invalid_grad_norm is_optimized_parameter is_transformers_cache "
        "maybe_loss_for_backward noop_context:class offload_adam_states register_output_backward_hooks "
        "reload_adam_states"
    ),
    "deepspeed.runtime.zero.config": "get_zero_config read_zero_config_deprecated",
    "deepspeed.runtime.zero.contiguous_memory_allocator": "ContiguousMemoryAllocator print_rank_0",
    "deepspeed.runtime.zero.linear": "print_rank_0",
    "deepspeed.runtime.zero.mics": "has_hierarchical_all_gather_groups",
    "deepspeed.runtime.zero.muon.original_muon": "ns_compute_dtype",
    "deepspeed.runtime.zero.offload_states": (
        "offload_adam_states offload_optimizer_states reload_adam_states reload_optimizer_states "
        "unpin_offloaded_optimizer_states"
    ),
    "deepspeed.runtime.zero.parameter_offload": "ensure_zero_ordered_dict",
    "deepspeed.runtime.zero.partition_parameters": (
        "AllReduceCoalescedHandle MultipleAllGatherHandles NoGatherCoalescedHandle QuantizationInfo "
        "debug_rank0 get_allgather_dtype get_new_tensor_fn_for_dtype print_rank_0"
    ),
    "deepspeed.runtime.zero.partitioned_param_coordinator": "ZeRoTraceMode debug_rank0",
    "deepspeed.runtime.zero.partitioned_param_profiler": "PartitionedParameterProfiler",
    "deepspeed.runtime.zero.stage3": "IPGBucketZ3 isclose model_to_params move_to_cpu",
    "deepspeed.runtime.zero.stage_1_and_2": (
        "GradPartitionBufferGroup IPGBucket get_alignment_padding isclose model_to_params print_rank_msg "
        "split_half_float_double"
    ),
    "deepspeed.runtime.zero.tiling": "split_tensor_along_last_dim",
    "deepspeed.runtime.zero.utils": (
        "defragment get_mapping_to_flat_buffer get_norm_dtype is_builtin_type isinstance_namedtuple"
    ),
    "deepspeed.sequence.cross_entropy": (
        "VocabParallelCausalLMLoss VocabParallelCrossEntropyLoss configure_vocab_parallel_loss "
        "validate_vocab_parallel_loss vocab_parallel_cross_entropy"
    ),
    "deepspeed.sequence.fpdt_layer": "apply_rotary_pos_emb_backward bias_gelu bias_gelu_back update_out_and_lse",
    "deepspeed.sequence.layer": (
        "post_all2all pre_all2all_fun register_all_to_all_group single_all_to_all uneven_heads_all2all"
    ),
    "deepspeed.sequence.linear_cross_entropy": "vocab_parallel_linear_cross_entropy",
    "deepspeed.utils.comms_logging": "get_caller_func print_rank_0",
    "deepspeed.utils.config": "DeepSpeedThroughputTimerConfig get_timers_config",
    "deepspeed.utils.debug": (
        "WeakIdNameMap debug_param2name_id_numel ds_id ds_shape print_rank print_rank0 printflock"
    ),
    "deepspeed.utils.groups": (
        "get_tensor_model_parallel_src_rank set_tensor_model_parallel_rank set_tensor_model_parallel_world_size"
    ),
    "deepspeed.utils.logging": "get_dist_msg get_log_level_from_string",
    "deepspeed.utils.numa": "check_for_numactl_pkg get_numa_cores parse_range parse_range_list",
    "deepspeed.utils.pin_memory": "NativePinnedMemory get_active_native_pinned_memory get_native_pinned_memory",
    "deepspeed.utils.pin_memory_tracker": "pinned_memory_summary track_pinned_memory",
    "deepspeed.utils.static_cache": "DeepSpeedStaticCache DeepSpeedStaticLayer",
    "deepspeed.utils.torch": "is_functorch_transforming jit_script_compat register_grad_hook",
    "deepspeed.utils.z3_leaf_module": "apply_zero_leaf_module_config",
    "deepspeed.utils.zero_to_fp32": (
        "GatheredTensor atoi convert_zero_checkpoint_to_state_dict get_checkpoint_files natural_keys "
        "to_torch_tensor zero3_partitioned_param_info zero_model_state:class"
    ),
    "deepspeed.utils.zero_to_torch": "main",
}
"""Module -> names, separated by spaces, in the form of `entries.stubs`."""
