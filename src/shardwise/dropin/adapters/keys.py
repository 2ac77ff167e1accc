"""Constants of formats: keys of configurations and checkpoint files, flags of schedules, launchers."""

from __future__ import annotations

from shardwise.config.schema import Config
from shardwise.config.schema.zero import LeafModule
from shardwise.launch.hosts import DEFAULT_HOSTFILE as DLTS_HOSTFILE

__all__ = ["DLTS_HOSTFILE"]

# Keys of the configuration, and defaults.
TRAIN_BATCH_SIZE = "train_batch_size"
TRAIN_MICRO_BATCH_SIZE_PER_GPU = "train_micro_batch_size_per_gpu"
GRADIENT_ACCUMULATION_STEPS = "gradient_accumulation_steps"
GRADIENT_CLIPPING = "gradient_clipping"
GRADIENT_CLIPPING_DEFAULT: float = Config.model_fields[GRADIENT_CLIPPING].default
STEPS_PER_PRINT = "steps_per_print"
OPTIMIZER = "optimizer"
SCHEDULER = "scheduler"
TYPE = "type"
FP16 = "fp16"
BFLOAT16 = "bf16"
OPTIMIZER_TYPE_DEFAULT = None
SCHEDULER_TYPE_DEFAULT = None
AIO = "aio"
AIO_BLOCK_SIZE = "block_size"
AIO_QUEUE_DEPTH = "queue_depth"
AIO_THREAD_COUNT = "thread_count"
AIO_INTRA_OP_PARALLELISM = "intra_op_parallelism"
AIO_SINGLE_SUBMIT = "single_submit"
AIO_OVERLAP_EVENTS = "overlap_events"
AIO_USE_GDS = "use_gds"
DEFAULT_LEAF_MODULE_CLASSES: list[str] = list(LeafModule.model_fields["classes"].default)
DEFAULT_LEAF_MODULE_NAMES: list[str] = list(LeafModule.model_fields["names"].default)
DEFAULT_LEAF_MODULE_NAME_SUFFIXES: list[str] = list(LeafModule.model_fields["name_suffixes"].default)

# Schedules, and their flags and arguments.
LR_SCHEDULE = "lr_schedule"
LR_RANGE_TEST = "LRRangeTest"
ONE_CYCLE = "OneCycle"
WARMUP_LR = "WarmupLR"
WARMUP_DECAY_LR = "WarmupDecayLR"
WARMUP_COSINE_LR = "WarmupCosineLR"
LR_RANGE_TEST_MIN_LR = "lr_range_test_min_lr"
LR_RANGE_TEST_STEP_RATE = "lr_range_test_step_rate"
LR_RANGE_TEST_STEP_SIZE = "lr_range_test_step_size"
LR_RANGE_TEST_STAIRCASE = "lr_range_test_staircase"
EDGE_VALUE = "edge_value"
MID_VALUE = "mid_value"
CYCLE_FIRST_STEP_SIZE = "cycle_first_step_size"
CYCLE_FIRST_STAIR_COUNT = "cycle_first_stair_count"
CYCLE_SECOND_STEP_SIZE = "cycle_second_step_size"
CYCLE_SECOND_STAIR_COUNT = "cycle_second_stair_count"
CYCLE_MIN_LR = "cycle_min_lr"
CYCLE_MAX_LR = "cycle_max_lr"
CYCLE_MIN_MOM = "cycle_min_mom"
CYCLE_MAX_MOM = "cycle_max_mom"
CYCLE_MOMENTUM = "cycle_momentum"
DECAY_STEP_SIZE = "decay_step_size"
DECAY_LR_RATE = "decay_lr_rate"
DECAY_MOM_RATE = "decay_mom_rate"
WARMUP_MIN_LR = "warmup_min_lr"
WARMUP_MAX_LR = "warmup_max_lr"
WARMUP_NUM_STEPS = "warmup_num_steps"
WARMUP_TYPE = "warmup_type"
WARMUP_LOG_RATE = "log"
WARMUP_LINEAR_RATE = "linear"
WARMUP_MIN_RATIO = "warmup_min_ratio"
COS_MIN_RATIO = "cos_min_ratio"
TOTAL_NUM_STEPS = "total_num_steps"

# Keys inside of DeepSpeed's checkpoint files, which `shardwise.checkpoint` reads.
OPTIMIZER_STATE_DICT = "optimizer_state_dict"
FP32_FLAT_GROUPS = "fp32_flat_groups"
SINGLE_PARTITION_OF_FP32_GROUPS = "single_partition_of_fp32_groups"
BASE_OPTIMIZER_STATE = "base_optimizer_state"
GROUP_PADDINGS = "group_paddings"
PARAM_SLICE_MAPPINGS = "param_slice_mappings"
PARTITION_COUNT = "partition_count"
ZERO_STAGE = "zero_stage"
LOSS_SCALER = "loss_scaler"
CLIP_GRAD = "clip_grad"
DS_VERSION = "ds_version"
BUFFER_NAMES = "buffer_names"
PARAM_SHAPES = "param_shapes"
FROZEN_PARAM_SHAPES = "frozen_param_shapes"
FROZEN_PARAM_FRAGMENTS = "frozen_param_fragments"
UNIVERSAL_CHECKPOINT_INFO = "universal_checkpoint_info"

# Values of the command's option --launcher, and variables that it sets.
PDSH_LAUNCHER = "pdsh"
OPENMPI_LAUNCHER = "openmpi"
MVAPICH_LAUNCHER = "mvapich"
SLURM_LAUNCHER = "slurm"
MPICH_LAUNCHER = "mpich"
IMPI_LAUNCHER = "impi"
CROSS_RANK = "CROSS_RANK"
CROSS_SIZE = "CROSS_SIZE"
