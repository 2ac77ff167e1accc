from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["DataStatesCheckpointEngine"]

@deprecated('checkpoints are written by `shardwise.checkpoint`, which has no exchangeable engines')
class DataStatesCheckpointEngine:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
