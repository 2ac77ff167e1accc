from typing import Any, NoReturn

from typing_extensions import deprecated

from shardwise_deepspeed.timers import BACKWARD_GLOBAL_TIMER as BACKWARD_GLOBAL_TIMER
from shardwise_deepspeed.timers import BACKWARD_INNER_GLOBAL_TIMER as BACKWARD_INNER_GLOBAL_TIMER
from shardwise_deepspeed.timers import BACKWARD_INNER_MICRO_TIMER as BACKWARD_INNER_MICRO_TIMER
from shardwise_deepspeed.timers import BACKWARD_MICRO_TIMER as BACKWARD_MICRO_TIMER
from shardwise_deepspeed.timers import BACKWARD_REDUCE_GLOBAL_TIMER as BACKWARD_REDUCE_GLOBAL_TIMER
from shardwise_deepspeed.timers import BACKWARD_REDUCE_MICRO_TIMER as BACKWARD_REDUCE_MICRO_TIMER
from shardwise_deepspeed.timers import FORWARD_GLOBAL_TIMER as FORWARD_GLOBAL_TIMER
from shardwise_deepspeed.timers import FORWARD_MICRO_TIMER as FORWARD_MICRO_TIMER
from shardwise_deepspeed.timers import NoopTimer as NoopTimer
from shardwise_deepspeed.timers import STEP_GLOBAL_TIMER as STEP_GLOBAL_TIMER
from shardwise_deepspeed.timers import STEP_MICRO_TIMER as STEP_MICRO_TIMER
from shardwise_deepspeed.timers import SynchronizedWallClockTimer as SynchronizedWallClockTimer
from shardwise_deepspeed.timers import TIME_EPSILON as TIME_EPSILON
from shardwise_deepspeed.timers import ThroughputTimer as ThroughputTimer
from shardwise_deepspeed.timers import trim_mean as trim_mean

__all__ = ["BACKWARD_GLOBAL_TIMER", "BACKWARD_INNER_GLOBAL_TIMER", "BACKWARD_INNER_MICRO_TIMER", "BACKWARD_MICRO_TIMER", "BACKWARD_REDUCE_GLOBAL_TIMER", "BACKWARD_REDUCE_MICRO_TIMER", "CudaEventTimer", "FORWARD_GLOBAL_TIMER", "FORWARD_MICRO_TIMER", "NoopTimer", "STEP_GLOBAL_TIMER", "STEP_MICRO_TIMER", "SynchronizedWallClockTimer", "TIME_EPSILON", "ThroughputTimer", "trim_mean"]

@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
class CudaEventTimer:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
