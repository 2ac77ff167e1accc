from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["Backend"]

@deprecated("it is one of DeepSpeed's own backends: torch.distributed's process groups are used as they are")
class Backend:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
