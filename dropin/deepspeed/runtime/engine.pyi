from typing import Any, NoReturn

from typing_extensions import deprecated

from shardwise_deepspeed.engine import DeepSpeedEngine as DeepSpeedEngine
from shardwise_deepspeed.optimizers import DeepSpeedOptimizerCallable as DeepSpeedOptimizerCallable
from shardwise_deepspeed.optimizers import DeepSpeedSchedulerCallable as DeepSpeedSchedulerCallable

__all__ = ["ADAM_OPTIMIZER", "DeepSpeedEngine", "DeepSpeedOptimizerCallable", "DeepSpeedSchedulerCallable", "EngineTimers", "LAMB_OPTIMIZER", "MEMORY_OPT_ALLREDUCE_SIZE", "split_half_float_double_sparse"]

ADAM_OPTIMIZER: str
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
class EngineTimers:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
LAMB_OPTIMIZER: str
MEMORY_OPT_ALLREDUCE_SIZE: object
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def split_half_float_double_sparse(*args: Any, **kwargs: Any) -> NoReturn: ...
