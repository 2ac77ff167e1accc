from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["PartitionedParameterProfiler"]

@deprecated('it is an inner part of DeepSpeed: here all ZeRO stages are one code path, without wrappers of optimizers')
class PartitionedParameterProfiler:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
