from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["FlattenedTensorSwapInfo", "OptimizerStateSwapInfo", "OptimizerSwapper", "SwapTensorContext"]

@deprecated('it is an inner part of DeepSpeed: here state is kept on disks by `shardwise.offload`, requested by zero_optimization.offload_optimizer and offload_param')
class FlattenedTensorSwapInfo:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('it is an inner part of DeepSpeed: here state is kept on disks by `shardwise.offload`, requested by zero_optimization.offload_optimizer and offload_param')
class OptimizerStateSwapInfo:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('it is an inner part of DeepSpeed: here state is kept on disks by `shardwise.offload`, requested by zero_optimization.offload_optimizer and offload_param')
class OptimizerSwapper:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('it is an inner part of DeepSpeed: here state is kept on disks by `shardwise.offload`, requested by zero_optimization.offload_optimizer and offload_param')
class SwapTensorContext:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
