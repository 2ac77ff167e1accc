from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["FastFileWriter", "FastFileWriterConfig"]

@deprecated('checkpoints are written by `shardwise.checkpoint`, without file writers that could be exchanged')
class FastFileWriter:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('checkpoints are written by `shardwise.checkpoint`, without file writers that could be exchanged')
class FastFileWriterConfig:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
