from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["CheckpointDataParallel", "CheckpointWriterType", "ValidationMode"]

@deprecated('checkpoints are written by `shardwise.checkpoint`, without file writers that could be exchanged')
class CheckpointDataParallel:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('checkpoints are written by `shardwise.checkpoint`, without file writers that could be exchanged')
class CheckpointWriterType:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('checkpoints are written by `shardwise.checkpoint`, without file writers that could be exchanged')
class ValidationMode:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
