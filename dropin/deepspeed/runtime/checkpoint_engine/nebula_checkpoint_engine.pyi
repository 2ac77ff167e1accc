from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["NebulaCheckpointEngine"]

@deprecated('checkpoints are written by `shardwise.checkpoint`, which has no exchangeable engines')
class NebulaCheckpointEngine:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
