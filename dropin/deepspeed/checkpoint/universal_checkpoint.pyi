from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["SubparamShape", "enable_universal_checkpoint", "load_hp_checkpoint_state"]

@deprecated('checkpoints here fit any layout as they are; `shardwise export-universal` writes the universal format, and load_checkpoint() reads the format')
class SubparamShape:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('checkpoints here fit any layout as they are; `shardwise export-universal` writes the universal format, and load_checkpoint() reads the format')
def enable_universal_checkpoint(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('checkpoints here fit any layout as they are; `shardwise export-universal` writes the universal format, and load_checkpoint() reads the format')
def load_hp_checkpoint_state(*args: Any, **kwargs: Any) -> NoReturn: ...
