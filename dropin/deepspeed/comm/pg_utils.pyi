from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["is_parallel"]

@deprecated("it is one of DeepSpeed's own backends: torch.distributed's process groups are used as they are")
def is_parallel(*args: Any, **kwargs: Any) -> NoReturn: ...
