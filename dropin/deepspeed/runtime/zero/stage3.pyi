from typing import Any, NoReturn

from typing_extensions import deprecated

from shardwise_deepspeed.estimates import estimate_zero3_model_states_mem_needs as estimate_zero3_model_states_mem_needs
from shardwise_deepspeed.estimates import estimate_zero3_model_states_mem_needs_all_cold as estimate_zero3_model_states_mem_needs_all_cold
from shardwise_deepspeed.estimates import estimate_zero3_model_states_mem_needs_all_live as estimate_zero3_model_states_mem_needs_all_live
from shardwise_deepspeed.building import unwrap_model_for_generation as unwrap_model_for_generation

__all__ = ["DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3", "FWD_MODULE_STACK", "INIT_OPTIMIZER_TIMER", "IPGBucketZ3", "estimate_zero3_model_states_mem_needs", "estimate_zero3_model_states_mem_needs_all_cold", "estimate_zero3_model_states_mem_needs_all_live", "isclose", "model_to_params", "move_to_cpu", "print_rank_0", "unwrap_model_for_generation"]

@deprecated('it is an inner part of DeepSpeed: here all ZeRO stages are one code path, without wrappers of optimizers')
class DeepSpeedZeroOptimizer:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('it is an inner part of DeepSpeed: here all ZeRO stages are one code path, without wrappers of optimizers')
class DeepSpeedZeroOptimizer_Stage3:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
FWD_MODULE_STACK: object
INIT_OPTIMIZER_TIMER: object
@deprecated('it is an inner part of DeepSpeed: here all ZeRO stages are one code path, without wrappers of optimizers')
class IPGBucketZ3:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('it is an inner part of DeepSpeed: here all ZeRO stages are one code path, without wrappers of optimizers')
def isclose(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed: here all ZeRO stages are one code path, without wrappers of optimizers')
def model_to_params(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed: here all ZeRO stages are one code path, without wrappers of optimizers')
def move_to_cpu(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed: here all ZeRO stages are one code path, without wrappers of optimizers')
def print_rank_0(*args: Any, **kwargs: Any) -> NoReturn: ...
