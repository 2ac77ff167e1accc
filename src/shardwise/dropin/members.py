"""Members of DeepSpeed's classes, and those of them that this library's classes have. The form is that of `table`; a
key is the path of a class. `PARAMETER` stands for a resharded parameter.
"""

from __future__ import annotations

from shardwise.absent import ENGINE, OPS, PIPELINE_MODULE
from shardwise.dropin.entries import Entry, Missing, members, merge, missing
from shardwise.engine.getters import GETTERS

PARAMETER = "a released parameter of ZeRO stage 3"

_PIPELINE_ENGINE = (
    *("set_has_attention_mask", "reset_activation_shape", "get_additional_losses"),
    *("tput_log", "log_for_device", "is_pipe_parallel"),
)

_NO_STATE = "nothing is attached to parameters: GatheredParameters and the engine move values"

MEMBERS: dict[str, dict[str, Entry]] = {
    "deepspeed.DeepSpeedEngine": merge(
        # attributes
        members("module optimizer basic_optimizer client_optimizer client_lr_scheduler lr_scheduler config device"),
        members("training_dataloader local_rank global_rank world_size dp_world_size mp_world_size seq_dp_world_size"),
        members("sequence_parallel_size global_steps global_samples micro_steps skipped_steps gas_boundary_ctr mpu"),
        members("data_parallel_group seq_data_parallel_group mesh_device has_moe_layers num_experts param_names"),
        members("moe_layers expert_parallel_group"),
        members("pipeline_parallelism enable_backward_allreduce gradient_average inside_no_sync_ctxt dist_backend"),
        members("communication_data_type is_compiled monitor"),
        # training
        members(
            "forward(*inputs, **kwargs)",
            "backward(loss, retain_graph=False, scale_wrt_gas=True)",
            "scale(loss)",
            "step(lr_kwargs=None)",
            "train(mode=True)",
            "eval()",
            "zero_grad()",
            "no_sync()",
            "is_gradient_accumulation_boundary()",
            "set_gradient_accumulation_boundary(is_boundary)",
            "was_step_applied()",
            "get_global_grad_norm()",
            "set_train_batch_size(train_batch_size)",
            "set_train_micro_batch_size(micro_batch_size)",
            "get_batch_info()",
            "compile(backend=..., compile_kwargs=None, schedule=None, compiled_autograd_enabled=False)",
            "empty_partition_cache()",
            "deepspeed_io(dataset, batch_size=None, route='train', pin_memory=True, data_sampler=None, "
            "collate_fn=None, num_local_io_workers=None)",
            "offload_states(include=None, device=..., pin_memory=True, non_blocking=False)",
            "reload_states(non_blocking=False)",
            "destroy()",
        ),
        # checkpoints
        members(
            "save_checkpoint(save_dir, tag=None, client_state=..., save_latest=True, exclude_frozen_parameters=False)",
            "load_checkpoint(load_dir, tag=None, load_module_strict=True, load_optimizer_states=True, "
            "load_lr_scheduler_states=True, load_module_only=False, custom_load_fn=None)",
            "save_16bit_model(save_dir, save_filename=..., exclude_frozen_parameters=False)",
            "save_fp16_model(save_dir, save_filename=..., exclude_frozen_parameters=False)",
            "module_state_dict(destination=None, prefix='', keep_vars=False, exclude_frozen_parameters=False)",
            "load_module_state_dict(checkpoint, strict=True, custom_load_fn=None, fetch_z3_params=False)",
            "_zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=False)",
            "_consolidated_16bit_state_dict(exclude_frozen_parameters=False)",
        ),
        # the configuration
        members(" ".join(GETTERS)),
        members("train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps get_lr get_mom get_type"),
        members("get_data_parallel_rank get_tensor_parallel_rank get_model_parallel_rank"),
        {name: Missing(reason) for name, reason in ENGINE.items()},
    ),
    "deepspeed.runtime.pipe.engine.PipelineEngine": merge(
        members("pipeline_parallelism num_stages stage_id grid"),
        members(
            "train_batch(data_iter=None)",
            "eval_batch(data_iter, return_logits=False, compute_loss=True, reduce_output='avg', bcast_loss=True, "
            "num_micro_batches=None)",
            "inference_batch(data_iter)",
            "set_dataloader(loader)",
            "set_dataiterator(iterator)",
            "set_batch_fn(fn)",
            "set_train_batch_size(train_batch_size)",
            "is_first_stage()",
            "is_last_stage()",
            "get_pipeline_parallel_rank()",
            "is_gradient_accumulation_boundary()",
            "load_module_state_dict(checkpoint, strict=True, custom_load_fn=None, fetch_z3_params=False)",
        ),
        {name: Missing(ENGINE[name]) for name in _PIPELINE_ENGINE},
    ),
    "deepspeed.runtime.pipe.module.PipelineModule": merge(
        members("num_stages topology stage_owner forward loss_fn train state_dict compile"),
        members("set_checkpoint_interval(interval)"),
        {name: Missing(reason) for name, reason in PIPELINE_MODULE.items()},
    ),
    "deepspeed.accelerator.DeepSpeedAccelerator": merge(
        members("is_synchronized_device use_host_timers resolves_data_dependency handles_memory_backpressure"),
        members("device_name(device_index=None)", "device set_device current_device current_device_name device_count"),
        members("synchronize random set_rng_state get_rng_state manual_seed manual_seed_all initial_seed"),
        members("default_generator Stream stream current_stream default_stream Event empty_cache memory_allocated"),
        members("max_memory_allocated reset_max_memory_allocated memory_cached max_memory_cached memory_stats"),
        members("reset_max_memory_cached reset_peak_memory_stats memory_reserved max_memory_reserved total_memory"),
        members("available_memory is_bf16_supported is_fp16_supported supported_dtypes is_available range_push"),
        members("range_pop lazy_call communication_backend_name communication_backend_version is_triton_supported"),
        members("create_graph capture_to_graph replay_graph BFloat16Tensor ByteTensor DoubleTensor FloatTensor"),
        members("HalfTensor IntTensor LongTensor pin_memory unpin_memory is_pinned on_accelerator export_envs"),
        members("visible_devices_envs set_visible_devices_envs get_compile_backend set_compile_backend"),
        members("create_op_builder(class_name)", "get_op_builder(class_name)"),
        missing(OPS, "op_builder_dir build_extension"),
        missing("there are no kernels of Triton's", "prefer_triton_grouped_mm"),
    ),
    "deepspeed.utils.comms_logging.CommsLogger": merge(
        members("comms_dict configure start_profiling_comms stop_profiling_comms start_profiling_op(op_name_list)"),
        members("stop_profiling_op(op_name_list)", "append get_raw_data has_data reset_data get_operation_names"),
        members("get_total_operations get_operation_summary(operation_name)", "log_all"),
    ),
    "deepspeed.monitor.monitor.MonitorMaster": members(
        "tb_monitor wandb_monitor csv_monitor comet_monitor enabled", "write_events(event_list)"
    ),
    "deepspeed.ops.op_builder.CPUAdamBuilder": members("NAME name is_compatible(verbose=False)", "load(verbose=True)"),
    "deepspeed.runtime.lr_schedules.WarmupLR": members("get_lr get_last_lr step state_dict load_state_dict"),
    "deepspeed.zero.ZeroParamStatus": members("AVAILABLE NOT_AVAILABLE INFLIGHT"),
    "deepspeed.runtime.zero.config.ZeroStageEnum": members("disabled optimizer_states gradients weights max_stage"),
    "deepspeed.runtime.zero.offload_config.OffloadDeviceEnum": members("none cpu nvme"),
    "deepspeed.runtime.zero.offload_config.OffloadStateTypeEnum": members(
        "optim_states hp_params lp_params lp_grads contiguous_grad_buffer"
    ),
    PARAMETER: merge(
        members("ds_id ds_shape ds_numel ds_status partition_numel item"),
        missing(_NO_STATE, "ds_numel_aligned ds_tensor ds_param_type ds_persist ds_active_sub_modules"),
        missing(_NO_STATE, "ds_process_group ds_secondary_tensor ds_zero_param_process_group"),
        missing(_NO_STATE, "ds_zero_partition_rank ds_zero_partition_world_size is_external_param nvme_swapper"),
        missing(_NO_STATE, "all_gather all_gather_coalesced partition reduce_gradients_at_owner partition_gradients"),
        missing(_NO_STATE, "aligned_size padding_size get_available_parameter_numel ds_summary"),
    ),
}
"""Class -> member -> entry."""
