from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["CheckpointSize", "DecoupledCheckpointEngine", "DecoupledEvent", "init_decoupled_checkpoint"]

@deprecated('checkpoints are written by `shardwise.checkpoint`, which has no exchangeable engines')
class CheckpointSize:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('checkpoints are written by `shardwise.checkpoint`, which has no exchangeable engines')
class DecoupledCheckpointEngine:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('checkpoints are written by `shardwise.checkpoint`, which has no exchangeable engines')
class DecoupledEvent:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('checkpoints are written by `shardwise.checkpoint`, which has no exchangeable engines')
def init_decoupled_checkpoint(*args: Any, **kwargs: Any) -> NoReturn: ...
