from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["Double_IO_Buffer"]

@deprecated('checkpoints are written by `shardwise.checkpoint`, without file writers that could be exchanged')
class Double_IO_Buffer:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
