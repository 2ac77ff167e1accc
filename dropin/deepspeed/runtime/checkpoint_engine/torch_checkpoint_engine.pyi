from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["CheckpointEngine", "TorchCheckpointEngine"]

@deprecated('checkpoints are written by `shardwise.checkpoint`, which has no exchangeable engines')
class CheckpointEngine:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('checkpoints are written by `shardwise.checkpoint`, which has no exchangeable engines')
class TorchCheckpointEngine:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
