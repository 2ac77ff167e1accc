from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["DominoAsyncColumnParallelLinear", "DominoAsyncColumnParallelLinearImpl", "RowParallelLinearNoComm"]

@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
class DominoAsyncColumnParallelLinear:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
class DominoAsyncColumnParallelLinearImpl:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
class RowParallelLinearNoComm:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
