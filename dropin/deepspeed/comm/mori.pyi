from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["allgather_into_tensor", "init", "is_enabled", "supports"]

@deprecated("it is one of DeepSpeed's own backends: torch.distributed's process groups are used as they are")
def allgather_into_tensor(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated("it is one of DeepSpeed's own backends: torch.distributed's process groups are used as they are")
def init(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated("it is one of DeepSpeed's own backends: torch.distributed's process groups are used as they are")
def is_enabled(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated("it is one of DeepSpeed's own backends: torch.distributed's process groups are used as they are")
def supports(*args: Any, **kwargs: Any) -> NoReturn: ...
