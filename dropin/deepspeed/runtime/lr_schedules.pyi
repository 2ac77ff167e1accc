from typing import Any, NoReturn

from typing_extensions import deprecated

from shardwise.schedules import LRRangeTest as LRRangeTest
from shardwise.schedules import OneCycle as OneCycle
from shardwise.schedules import VALID_LR_SCHEDULES as VALID_LR_SCHEDULES
from shardwise.schedules import WarmupCosineLR as WarmupCosineLR
from shardwise_deepspeed.schedules import WarmupDecayLR as WarmupDecayLR
from shardwise.schedules import WarmupLR as WarmupLR
from shardwise_deepspeed.schedule_arguments import add_tuning_arguments as add_tuning_arguments
from shardwise_deepspeed.schedule_arguments import get_config_from_args as get_config_from_args
from shardwise_deepspeed.schedule_arguments import get_lr_from_config as get_lr_from_config
from shardwise_deepspeed.helpers import get_torch_optimizer as get_torch_optimizer
from shardwise_deepspeed.schedule_arguments import override_params as override_params
from shardwise_deepspeed.schedule_arguments import parse_arguments as parse_arguments
from shardwise_deepspeed.helpers import update_lr as update_lr

__all__ = ["COS_MIN_RATIO", "CYCLE_FIRST_STAIR_COUNT", "CYCLE_FIRST_STEP_SIZE", "CYCLE_MAX_LR", "CYCLE_MAX_MOM", "CYCLE_MIN_LR", "CYCLE_MIN_MOM", "CYCLE_MOMENTUM", "CYCLE_SECOND_STAIR_COUNT", "CYCLE_SECOND_STEP_SIZE", "DECAY_LR_RATE", "DECAY_MOM_RATE", "DECAY_STEP_SIZE", "EDGE_VALUE", "LRRangeTest", "LR_RANGE_TEST", "LR_RANGE_TEST_MIN_LR", "LR_RANGE_TEST_STAIRCASE", "LR_RANGE_TEST_STEP_RATE", "LR_RANGE_TEST_STEP_SIZE", "LR_SCHEDULE", "MID_VALUE", "ONE_CYCLE", "OneCycle", "TOTAL_NUM_STEPS", "VALID_LR_SCHEDULES", "WARMUP_COSINE_LR", "WARMUP_DECAY_LR", "WARMUP_LINEAR_RATE", "WARMUP_LOG_RATE", "WARMUP_LR", "WARMUP_MAX_LR", "WARMUP_MIN_LR", "WARMUP_MIN_RATIO", "WARMUP_NUM_STEPS", "WARMUP_TYPE", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR", "add_tuning_arguments", "get_config_from_args", "get_lr_from_config", "get_torch_optimizer", "override_1cycle_params", "override_lr_range_test_params", "override_params", "override_warmupCosineLR_params", "override_warmupLR_params", "parse_arguments", "update_lr"]

COS_MIN_RATIO: str
CYCLE_FIRST_STAIR_COUNT: str
CYCLE_FIRST_STEP_SIZE: str
CYCLE_MAX_LR: str
CYCLE_MAX_MOM: str
CYCLE_MIN_LR: str
CYCLE_MIN_MOM: str
CYCLE_MOMENTUM: str
CYCLE_SECOND_STAIR_COUNT: str
CYCLE_SECOND_STEP_SIZE: str
DECAY_LR_RATE: str
DECAY_MOM_RATE: str
DECAY_STEP_SIZE: str
EDGE_VALUE: str
LR_RANGE_TEST: str
LR_RANGE_TEST_MIN_LR: str
LR_RANGE_TEST_STAIRCASE: str
LR_RANGE_TEST_STEP_RATE: str
LR_RANGE_TEST_STEP_SIZE: str
LR_SCHEDULE: str
MID_VALUE: str
ONE_CYCLE: str
TOTAL_NUM_STEPS: str
WARMUP_COSINE_LR: str
WARMUP_DECAY_LR: str
WARMUP_LINEAR_RATE: str
WARMUP_LOG_RATE: str
WARMUP_LR: str
WARMUP_MAX_LR: str
WARMUP_MIN_LR: str
WARMUP_MIN_RATIO: str
WARMUP_NUM_STEPS: str
WARMUP_TYPE: str
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def override_1cycle_params(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def override_lr_range_test_params(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def override_warmupCosineLR_params(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def override_warmupLR_params(*args: Any, **kwargs: Any) -> NoReturn: ...
