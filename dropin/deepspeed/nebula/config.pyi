from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["DeepSpeedNebulaConfig"]

@deprecated('checkpoints are written by `shardwise.checkpoint`, which has no exchangeable engines')
class DeepSpeedNebulaConfig:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
