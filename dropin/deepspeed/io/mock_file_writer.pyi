from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["MockFileWriter"]

@deprecated('checkpoints are written by `shardwise.checkpoint`, without file writers that could be exchanged')
class MockFileWriter:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
