from typing import Any, NoReturn

from typing_extensions import deprecated

from shardwise_deepspeed.optimizers import DeepSpeedOptimizer as DeepSpeedOptimizer

__all__ = ["BackwardHookStateManager", "DeepSpeedOptimizer", "ZeROOptimizer"]

@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
class BackwardHookStateManager:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('it is an inner part of DeepSpeed: here all ZeRO stages are one code path, without wrappers of optimizers')
class ZeROOptimizer:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
