from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["create_checkpoint_engine"]

@deprecated('checkpoints are written by `shardwise.checkpoint`, which has no exchangeable engines')
def create_checkpoint_engine(*args: Any, **kwargs: Any) -> NoReturn: ...
