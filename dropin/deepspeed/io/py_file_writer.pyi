from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["PyFileWriter"]

@deprecated('checkpoints are written by `shardwise.checkpoint`, without file writers that could be exchanged')
class PyFileWriter:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
