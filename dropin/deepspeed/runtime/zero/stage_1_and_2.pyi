from typing import Any, NoReturn

from typing_extensions import deprecated

from shardwise_deepspeed.estimates import estimate_zero2_model_states_mem_needs as estimate_zero2_model_states_mem_needs
from shardwise_deepspeed.estimates import estimate_zero2_model_states_mem_needs_all_cold as estimate_zero2_model_states_mem_needs_all_cold
from shardwise_deepspeed.estimates import estimate_zero2_model_states_mem_needs_all_live as estimate_zero2_model_states_mem_needs_all_live

__all__ = ["DeepSpeedZeroOptimizer", "GradPartitionBufferGroup", "IPGBucket", "estimate_zero2_model_states_mem_needs", "estimate_zero2_model_states_mem_needs_all_cold", "estimate_zero2_model_states_mem_needs_all_live", "get_alignment_padding", "isclose", "model_to_params", "print_rank_msg", "split_half_float_double"]

@deprecated('it is an inner part of DeepSpeed: here all ZeRO stages are one code path, without wrappers of optimizers')
class DeepSpeedZeroOptimizer:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('it is an inner part of DeepSpeed: here all ZeRO stages are one code path, without wrappers of optimizers')
class GradPartitionBufferGroup:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('it is an inner part of DeepSpeed: here all ZeRO stages are one code path, without wrappers of optimizers')
class IPGBucket:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('it is an inner part of DeepSpeed: here all ZeRO stages are one code path, without wrappers of optimizers')
def get_alignment_padding(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed: here all ZeRO stages are one code path, without wrappers of optimizers')
def isclose(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed: here all ZeRO stages are one code path, without wrappers of optimizers')
def model_to_params(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed: here all ZeRO stages are one code path, without wrappers of optimizers')
def print_rank_msg(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed: here all ZeRO stages are one code path, without wrappers of optimizers')
def split_half_float_double(*args: Any, **kwargs: Any) -> NoReturn: ...
