from typing import Any, NoReturn

from typing_extensions import deprecated

from shardwise_deepspeed.building import MiCS_Init as MiCS_Init

__all__ = ["MiCS_AllGatherCoalescedHandle", "MiCS_Init", "MiCS_Offload", "MiCS_Optimizer", "create_mics_comm_groups", "has_hierarchical_all_gather_groups"]

@deprecated('it is an inner part of DeepSpeed: here groups of ranks (MiCS) are one code path with everything else, requested by zero_optimization.mics_shard_size')
class MiCS_AllGatherCoalescedHandle:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('it is an inner part of DeepSpeed: here groups of ranks (MiCS) are one code path with everything else, requested by zero_optimization.mics_shard_size')
class MiCS_Offload:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('it is an inner part of DeepSpeed: here groups of ranks (MiCS) are one code path with everything else, requested by zero_optimization.mics_shard_size')
class MiCS_Optimizer:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('it is an inner part of DeepSpeed: here groups of ranks (MiCS) are one code path with everything else, requested by zero_optimization.mics_shard_size')
def create_mics_comm_groups(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed: here all ZeRO stages are one code path, without wrappers of optimizers')
def has_hierarchical_all_gather_groups(*args: Any, **kwargs: Any) -> NoReturn: ...
