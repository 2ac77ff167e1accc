from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["CCLBackend", "CCLHandler", "build_ccl_op"]

@deprecated("it is one of DeepSpeed's own backends: torch.distributed's process groups are used as they are")
class CCLBackend:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("it is one of DeepSpeed's own backends: torch.distributed's process groups are used as they are")
class CCLHandler:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("it is one of DeepSpeed's own backends: torch.distributed's process groups are used as they are")
def build_ccl_op(*args: Any, **kwargs: Any) -> NoReturn: ...
