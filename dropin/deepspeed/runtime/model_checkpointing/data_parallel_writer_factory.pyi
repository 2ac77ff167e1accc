from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["DataParallelWriterConfig", "DataParallelWriterFactory"]

@deprecated('checkpoints are written by `shardwise.checkpoint`, without file writers that could be exchanged')
class DataParallelWriterConfig:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('checkpoints are written by `shardwise.checkpoint`, without file writers that could be exchanged')
class DataParallelWriterFactory:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
