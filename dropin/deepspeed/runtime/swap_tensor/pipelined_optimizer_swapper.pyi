from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["OptimizerSwapOp", "PipelinedOptimizerSwapper"]

@deprecated('it is an inner part of DeepSpeed: here state is kept on disks by `shardwise.offload`, requested by zero_optimization.offload_optimizer and offload_param')
class OptimizerSwapOp:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('it is an inner part of DeepSpeed: here state is kept on disks by `shardwise.offload`, requested by zero_optimization.offload_optimizer and offload_param')
class PipelinedOptimizerSwapper:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
