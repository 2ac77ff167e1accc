from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["get_mpu_ranks", "meg_2d_parallel_map", "reshape", "reshape_meg_2d_parallel"]

@deprecated('checkpoints here fit any layout as they are; `shardwise export-universal` writes the universal format, and load_checkpoint() reads the format')
def get_mpu_ranks(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('checkpoints here fit any layout as they are; `shardwise export-universal` writes the universal format, and load_checkpoint() reads the format')
class meg_2d_parallel_map:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('checkpoints here fit any layout as they are; `shardwise export-universal` writes the universal format, and load_checkpoint() reads the format')
def reshape(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('checkpoints here fit any layout as they are; `shardwise export-universal` writes the universal format, and load_checkpoint() reads the format')
def reshape_meg_2d_parallel(*args: Any, **kwargs: Any) -> NoReturn: ...
