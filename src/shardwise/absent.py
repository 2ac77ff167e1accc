"""Names of DeepSpeed that this version lacks, with the reason: the end of a sentence that begins with the name.

The drop-in raises the reason when such a name is imported, the engine when such a member is used.
"""

from __future__ import annotations

# Features that are not built yet.
PIPELINE = (
    "it is an inner part of DeepSpeed's pipelines: here schedules are lists of actions (shardwise.pipe.make_schedule), "
    "and the messages between stages may have any form"
)
DUAL_PIPE = 'write the schedule into the configuration: `pipeline.schedule` "dualpipe-v" with a PipelineModule'
TENSOR = (
    "layers are divided in place, as `tensor_parallel` of the configuration or the model's own plan says "
    "(shardwise.tp_model_init); there are no policies or classes to build them of"
)
FPDT = "FPDT, which keeps attention's chunks on the host, is not built yet (shardwise.offload_activations joins)"
SHARED_VOCABULARY = "losses over a vocabulary that ranks share are not built yet (shardwise.parallel.tiled_loss)"
INFERENCE = "inference is not built yet"
AUTOTUNER = "the autotuner is not built yet"
SPARSE = "sparse attention is not built yet"
ELASTIC = (
    "elastic batch sizes are not built yet (`shardwise run --max-restarts N --min-nproc M` restarts a job with fewer "
    "processes)"
)
COMPRESS = "compression of models (pruning, quantisation, eigenvalues of layers) is not built yet"
DIRECT = "GPUDirect Storage is not built yet: data goes from disk to the device through page-locked memory of the host"
ZENFLOW = "ZenFlow, which steps a part of the gradients some steps late, is not built yet"
HYBRID = "the hybrid engine is not built yet"
DATA = "data efficiency (curriculum, dropping of layers or of their tokens, data analysis) is not built yet"
UNIVERSAL = (
    "checkpoints here fit any layout as they are; `shardwise export-universal` writes the universal format, and "
    "load_checkpoint() reads the format"
)
LAYERS = "fused layers are not built yet"
COMPILER = "compiler passes are not built yet"
MICS = (
    "it is an inner part of DeepSpeed: here groups of ranks (MiCS) are one code path with everything else, "
    "requested by zero_optimization.mics_shard_size"
)
LINEAR = "LoRA and quantised linear layers are not built yet"
TILED = "tiled linear layers are not built yet"
# Not planned.
OPS = "there are no operators to build: everything runs in plain torch"
INNER = "it is an inner part of DeepSpeed, which has no counterpart here"
WRAPPERS = "it is an inner part of DeepSpeed: here all ZeRO stages are one code path, without wrappers of optimizers"
SWAPPERS = (
    "it is an inner part of DeepSpeed: here state is kept on disks by `shardwise.offload`, requested by "
    "zero_optimization.offload_optimizer and offload_param"
)
TUNING = "disks are measured by `shardwise bench io` (with the drop-in also `ds_io` and `ds_nvme_tune`)"
WRITERS = "checkpoints are written by `shardwise.checkpoint`, without file writers that could be exchanged"
FILES = "checkpoints here are safetensors and JSON, which `shardwise.checkpoint` writes, and no files of this form"

_COALESCED = (
    "stages 0 and 1 reduce the gradients of several backward passes together (gradient_accumulation_steps, "
    "engine.no_sync()); stages 2 and 3 reduce those of each, so that no whole gradient is kept"
)
_LOADERS = "engine.deepspeed_io() takes both kinds of data"
_REDUCES = "gradients are reduced while backward() runs and clipped in step(), so that nothing is left to be called"

_LOSSES = "a loss function returns one loss; pass further ones from layer to layer, and add them there"

# Reason -> members of DeepSpeedEngine, separated by spaces.
_ENGINE: dict[str, str] = {
    "DeepSpeedConfig(engine.config) reads it as a whole": "_config",
    "engine.last_load says what was loaded": "loaded_checkpoint_dp_world_size loaded_checkpoint_mp_world_size",
    "its sums belong to the engine's reductions; engine.expert_parallel_group has the groups of tokens": (
        "expert_data_parallel_group"
    ),
    "`engine.moe_layers` has the layers, whose `deepspeed_moe.gate` is the gate": "gate_modules",
    "engine.load_checkpoint() loads experts at any expert-parallel size": "load_moe_state_dict",
    "engine.monitor.write_events() writes them": "summary_events",
    "times are logged (`wall_clock_breakdown`, `timers.throughput`), and no timers of the engine are handed out": (
        "timers tput_timer get_wall_clock_timers print_forward_breakdown"
    ),
    "engine.last_profile has what was counted": "flops_profiler",
    "checkpoints have no exchangeable engines": "checkpoint_engine",
    COMPRESS: "compression_scheduler quantizer",
    DATA: (
        "progressive_layer_drop curriculum_scheduler_legacy random_ltd_scheduler get_pld_theta "
        "set_data_post_process_func set_custom_curriculum_learning_schedule random_ltd_initialize"
    ),
    "losses are the script's": "losses",
    "engine.save_checkpoint() and load_checkpoint() write and read safetensors and JSON, in no files of this form": (
        "save_zero_checkpoint save_non_zero_checkpoint _save_checkpoint _save_zero_checkpoint _save_moe_checkpoint "
        "_load_checkpoint _load_zero_checkpoint _get_ckpt_name _get_zero_ckpt_name _get_rank_zero_ckpt_name "
        "_get_all_ckpt_names _get_all_zero_checkpoint_names _get_all_zero_checkpoints _get_expert_ckpt_name "
        "_get_optimizer_ckpt_name _get_mp_rank_zero_checkpoint_names _get_zero_ckpt_prefix _create_checkpoint_file "
        "_create_zero_checkpoint_files _checkpoint_tag_validation _copy_recovery_script "
        "_change_recovery_script_permissions _get_zero_param_shapes _get_zero_frozen_param_attributes "
        "_get_buffer_names _get_shared_params _get_non_moe_state_dict _common_checkpoint_state"
    ),
    "only the engine of a pipeline runs whole batches: pass a shardwise.pipe.PipelineModule to initialize()": (
        "train_batch eval_batch inference_batch set_dataloader set_dataiterator set_batch_fn is_first_stage "
        "is_last_stage get_pipeline_parallel_rank num_stages stage_id record_idle grid"
    ),
    "messages between stages may have any form, and shapes are agreed again when they change; leave the call out": (
        "set_has_attention_mask reset_activation_shape"
    ),
    _LOSSES: "get_additional_losses",
    "times are logged (`timers.throughput`), and engine.record_idle() has those of a pipeline": "tput_log",
    "logging.getLogger is what a script logs with": "log_for_device",
    "engine.pipeline_parallelism and engine.num_stages say it": "is_pipe_parallel",
    "the module of this engine has no such method, and the hybrid engine, which would have one, is not built yet": (
        "generate fuse_lora_weight unfuse_lora_weight"
    ),
    _COALESCED: "coalesce_grad_reduction",
    _REDUCES: (
        "allreduce_gradients clip_fp32_gradients allreduce_bucket allreduce_and_copy allreduce_no_retain "
        "buffered_allreduce_fallback sparse_allreduce sparse_allreduce_bucket sparse_allreduce_no_retain "
        "sparse_all_gather all_gather_scalar"
    ),
    _LOADERS: "is_map_style_dataset is_iterable_style_dataset",
    COMPILER: (
        "get_compile_time register_compile_pass is_deepcompile_enabled is_deepcompile_active "
        "get_deepspeed_compile_backend get_deepcompile_backend get_autosp_backend get_autotp_backend "
        "compile_zero_optimization_stage uses_parallelization_pass_only"
    ),
    "printing the engine's state is not built yet (engine.memory_report() has its memory)": "dump_state",
    "garbage collection is left to Python (gc.collect())": "collect_python_gc",
    INNER: "get_optimizer_configuration is_first_weights_partition_group",
}

# Member of DeepSpeedEngine -> reason of its absence.
ENGINE: dict[str, str] = {name: reason for reason, names in _ENGINE.items() for name in names.split()}

_FILES = "engine.save_checkpoint() and load_checkpoint() write and read all layers, in no files of a layer each"

# Reason -> members of DeepSpeed's PipelineModule.
_PIPELINE_MODULE: dict[str, str] = {
    "the engine adds up the gradients of tied weights in each step": "allreduce_tied_weight_gradients",
    "tied_parameters() says which weights are tied, and on which stages": "get_tied_weights_and_groups tied_comms",
    "engine.grid has the ranks and groups": "mpu",
    "num_stages has it": "num_pipeline_stages",
    "boundaries has it": "parts",
    "stages has the layers of this rank": "forward_funcs",
    _FILES: "ckpt_prefix ckpt_layer_path ckpt_layer_path_list save_state_dict load_state_dir",
    _LOSSES: "get_additional_losses",
}

# Member of PipelineModule -> reason of its absence.
PIPELINE_MODULE: dict[str, str] = {name: reason for reason, names in _PIPELINE_MODULE.items() for name in names.split()}
