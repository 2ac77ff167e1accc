from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["bytes_to_tensor", "obj_serialization_details", "required_minimum_torch_version", "serialize_details", "tensor_to_bytes"]

@deprecated('checkpoints are written by `shardwise.checkpoint`, without file writers that could be exchanged')
def bytes_to_tensor(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('checkpoints are written by `shardwise.checkpoint`, without file writers that could be exchanged')
def obj_serialization_details(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('checkpoints are written by `shardwise.checkpoint`, without file writers that could be exchanged')
def required_minimum_torch_version(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('checkpoints are written by `shardwise.checkpoint`, without file writers that could be exchanged')
class serialize_details:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('checkpoints are written by `shardwise.checkpoint`, without file writers that could be exchanged')
def tensor_to_bytes(*args: Any, **kwargs: Any) -> NoReturn: ...
