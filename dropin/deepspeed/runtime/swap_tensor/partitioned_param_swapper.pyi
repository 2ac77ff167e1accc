from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["AsyncPartitionedParameterSwapper", "PartitionedParamStatus", "print_rank_0"]

@deprecated('it is an inner part of DeepSpeed: here state is kept on disks by `shardwise.offload`, requested by zero_optimization.offload_optimizer and offload_param')
class AsyncPartitionedParameterSwapper:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('it is an inner part of DeepSpeed: here state is kept on disks by `shardwise.offload`, requested by zero_optimization.offload_optimizer and offload_param')
class PartitionedParamStatus:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('it is an inner part of DeepSpeed: here state is kept on disks by `shardwise.offload`, requested by zero_optimization.offload_optimizer and offload_param')
def print_rank_0(*args: Any, **kwargs: Any) -> NoReturn: ...
