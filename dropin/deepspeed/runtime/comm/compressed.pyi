from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["CompressedBackend"]

@deprecated("1-bit optimizers communicate through torch.distributed's process groups, without backends of their own")
class CompressedBackend:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
