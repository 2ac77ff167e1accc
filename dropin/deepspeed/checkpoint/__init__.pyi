from typing import Any, NoReturn

from typing_extensions import deprecated

from deepspeed.checkpoint import constants as constants
from deepspeed.checkpoint import deepspeed_checkpoint as deepspeed_checkpoint
from deepspeed.checkpoint import ds_to_universal as ds_to_universal
from deepspeed.checkpoint import reshape_3d_utils as reshape_3d_utils
from deepspeed.checkpoint import reshape_meg_2d as reshape_meg_2d
from deepspeed.checkpoint import reshape_utils as reshape_utils
from deepspeed.checkpoint import universal_checkpoint as universal_checkpoint
from deepspeed.checkpoint import utils as utils
from deepspeed.checkpoint import zero_checkpoint as zero_checkpoint

__all__ = ["BASE_OPTIMIZER_STATE", "BASE_OPTIMIZER_STATE_STEP", "BF16_ZERO_FILE_PREFIX", "BUFFER_NAMES", "CAT_DIM", "CHECKPOINT_PARALLEL_DIMS", "CHECKPOINT_PP_DEGREE", "CHECKPOINT_TP_DEGREE", "CLIP_GRAD", "DS_VERSION", "DeepSpeedCheckpoint", "FP16_ZERO_FILE_PREFIX", "FP32_FLAT_GROUPS", "FP32_GROUPS", "FP32_WEIGHT_KEY", "FROZEN_PARAM_FRAGMENTS", "FROZEN_PARAM_SHAPES", "GROUP_PADDINGS", "LAYER_FILE_PREFIX", "LOSS_SCALER", "MODEL_FILE_PREFIX", "MODEL_FILE_SUFFIX", "OPTIMIZER_STATE_DICT", "OPTIM_FILE_SUFFIX", "ORIGINAL_VOCAB_SIZE", "PADDED_VOCAB_SIZE", "PARAM", "PARAMETER_TO_AVERAGE_PATTERNS", "PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0", "PARAMETER_WITH_ROW_PARALLELISM_PATTERNS", "PARAMETER_WITH_SUB_PARAMS", "PARAM_ALIGNMENT_PADDINGS", "PARAM_GROUPS", "PARAM_N_SUB_PARAMS", "PARAM_SHAPES", "PARAM_SLICE_MAPPINGS", "PARTITION_COUNT", "PIPELINE_REPLICATED_PARAMETER_PATTERNS", "SINGLE_PARTITION_OF_FP32_GROUPS", "SUB_PARAMS_SHAPE", "SUB_PARAM_SHAPE", "SubparamShape", "TP_REPLICATED_PARAMETER_PATTERNS", "UNIVERSAL_CHECKPOINT_INFO", "UNIVERSAL_CHECKPOINT_VERSION_KEY", "UNIVERSAL_CHECKPOINT_VERSION_VALUE", "VOCABULARY_PARAMETER_PATTERNS", "VOCAB_TENSOR", "WHOLE_PARAM_OPTIMIZER_STATES", "ZERO_FILE_PREFIX", "ZERO_STAGE", "ZeROCheckpoint", "constants", "deepspeed_checkpoint", "ds_to_universal", "enable_universal_checkpoint", "load_hp_checkpoint_state", "model_3d_desc", "reshape_3d_utils", "reshape_meg_2d", "reshape_meg_2d_parallel", "reshape_utils", "universal_checkpoint", "utils", "zero_checkpoint"]

BASE_OPTIMIZER_STATE: str
BASE_OPTIMIZER_STATE_STEP: str
BF16_ZERO_FILE_PREFIX: str
BUFFER_NAMES: str
CAT_DIM: str
CHECKPOINT_PARALLEL_DIMS: str
CHECKPOINT_PP_DEGREE: str
CHECKPOINT_TP_DEGREE: str
CLIP_GRAD: str
DS_VERSION: str
@deprecated('checkpoints here fit any layout as they are; `shardwise export-universal` writes the universal format, and load_checkpoint() reads the format')
class DeepSpeedCheckpoint:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
FP16_ZERO_FILE_PREFIX: str
FP32_FLAT_GROUPS: str
FP32_GROUPS: str
FP32_WEIGHT_KEY: str
FROZEN_PARAM_FRAGMENTS: str
FROZEN_PARAM_SHAPES: str
GROUP_PADDINGS: str
LAYER_FILE_PREFIX: str
LOSS_SCALER: str
MODEL_FILE_PREFIX: str
MODEL_FILE_SUFFIX: str
OPTIMIZER_STATE_DICT: str
OPTIM_FILE_SUFFIX: str
ORIGINAL_VOCAB_SIZE: str
PADDED_VOCAB_SIZE: str
PARAM: str
PARAMETER_TO_AVERAGE_PATTERNS: str
PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0: str
PARAMETER_WITH_ROW_PARALLELISM_PATTERNS: str
PARAMETER_WITH_SUB_PARAMS: str
PARAM_ALIGNMENT_PADDINGS: str
PARAM_GROUPS: str
PARAM_N_SUB_PARAMS: str
PARAM_SHAPES: str
PARAM_SLICE_MAPPINGS: str
PARTITION_COUNT: str
PIPELINE_REPLICATED_PARAMETER_PATTERNS: str
SINGLE_PARTITION_OF_FP32_GROUPS: str
SUB_PARAMS_SHAPE: str
SUB_PARAM_SHAPE: str
@deprecated('checkpoints here fit any layout as they are; `shardwise export-universal` writes the universal format, and load_checkpoint() reads the format')
class SubparamShape:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
TP_REPLICATED_PARAMETER_PATTERNS: str
UNIVERSAL_CHECKPOINT_INFO: str
UNIVERSAL_CHECKPOINT_VERSION_KEY: str
UNIVERSAL_CHECKPOINT_VERSION_VALUE: float
VOCABULARY_PARAMETER_PATTERNS: str
VOCAB_TENSOR: str
WHOLE_PARAM_OPTIMIZER_STATES: object
ZERO_FILE_PREFIX: str
ZERO_STAGE: str
@deprecated('checkpoints here fit any layout as they are; `shardwise export-universal` writes the universal format, and load_checkpoint() reads the format')
class ZeROCheckpoint:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('checkpoints here fit any layout as they are; `shardwise export-universal` writes the universal format, and load_checkpoint() reads the format')
def enable_universal_checkpoint(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('checkpoints here fit any layout as they are; `shardwise export-universal` writes the universal format, and load_checkpoint() reads the format')
def load_hp_checkpoint_state(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('checkpoints here fit any layout as they are; `shardwise export-universal` writes the universal format, and load_checkpoint() reads the format')
class model_3d_desc:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('checkpoints here fit any layout as they are; `shardwise export-universal` writes the universal format, and load_checkpoint() reads the format')
def reshape_meg_2d_parallel(*args: Any, **kwargs: Any) -> NoReturn: ...
