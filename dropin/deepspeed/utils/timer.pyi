from typing import Any, NoReturn

from typing_extensions import deprecated

from shardwise_deepspeed.timers import NoopTimer as NoopTimer
from shardwise_deepspeed.timers import SynchronizedWallClockTimer as SynchronizedWallClockTimer
from shardwise_deepspeed.timers import ThroughputTimer as ThroughputTimer
from shardwise_deepspeed.timers import trim_mean as trim_mean

__all__ = ["BACKWARD_GLOBAL_TIMER", "BACKWARD_INNER_GLOBAL_TIMER", "BACKWARD_INNER_MICRO_TIMER", "BACKWARD_MICRO_TIMER", "BACKWARD_REDUCE_GLOBAL_TIMER", "BACKWARD_REDUCE_MICRO_TIMER", "CudaEventTimer", "FORWARD_GLOBAL_TIMER", "FORWARD_MICRO_TIMER", "NoopTimer", "STEP_GLOBAL_TIMER", "STEP_MICRO_TIMER", "SynchronizedWallClockTimer", "TIME_EPSILON", "ThroughputTimer", "trim_mean"]

BACKWARD_GLOBAL_TIMER: str
BACKWARD_INNER_GLOBAL_TIMER: str
BACKWARD_INNER_MICRO_TIMER: str
BACKWARD_MICRO_TIMER: str
BACKWARD_REDUCE_GLOBAL_TIMER: str
BACKWARD_REDUCE_MICRO_TIMER: str
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
class CudaEventTimer:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
FORWARD_GLOBAL_TIMER: str
FORWARD_MICRO_TIMER: str
STEP_GLOBAL_TIMER: str
STEP_MICRO_TIMER: str
TIME_EPSILON: float
