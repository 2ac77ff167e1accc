from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["flatten_dp_dimension", "get_model_3d_descriptor", "get_model_3d_descriptor_from_metadata", "model_3d_desc", "unflatten_dp_dimension"]

@deprecated('checkpoints here fit any layout as they are; `shardwise export-universal` writes the universal format, and load_checkpoint() reads the format')
def flatten_dp_dimension(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('checkpoints here fit any layout as they are; `shardwise export-universal` writes the universal format, and load_checkpoint() reads the format')
def get_model_3d_descriptor(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('checkpoints here fit any layout as they are; `shardwise export-universal` writes the universal format, and load_checkpoint() reads the format')
def get_model_3d_descriptor_from_metadata(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('checkpoints here fit any layout as they are; `shardwise export-universal` writes the universal format, and load_checkpoint() reads the format')
class model_3d_desc:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('checkpoints here fit any layout as they are; `shardwise export-universal` writes the universal format, and load_checkpoint() reads the format')
def unflatten_dp_dimension(*args: Any, **kwargs: Any) -> NoReturn: ...
