from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["DeepSpeedCheckpoint"]

@deprecated('checkpoints here fit any layout as they are; `shardwise export-universal` writes the universal format, and load_checkpoint() reads the format')
class DeepSpeedCheckpoint:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
