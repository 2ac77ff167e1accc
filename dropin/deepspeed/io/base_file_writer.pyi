from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["BaseFileWriter"]

@deprecated('checkpoints are written by `shardwise.checkpoint`, without file writers that could be exchanged')
class BaseFileWriter:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
