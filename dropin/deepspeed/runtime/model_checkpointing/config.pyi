from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["get_checkpoint_config", "get_checkpoint_writer_config"]

@deprecated('checkpoints are written by `shardwise.checkpoint`, without file writers that could be exchanged')
def get_checkpoint_config(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('checkpoints are written by `shardwise.checkpoint`, without file writers that could be exchanged')
def get_checkpoint_writer_config(*args: Any, **kwargs: Any) -> NoReturn: ...
