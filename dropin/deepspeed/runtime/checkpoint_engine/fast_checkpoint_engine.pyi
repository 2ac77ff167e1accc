from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["FastCheckpointEngine"]

@deprecated('checkpoints are written by `shardwise.checkpoint`, which has no exchangeable engines')
class FastCheckpointEngine:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
