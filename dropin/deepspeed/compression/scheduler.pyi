from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["compression_scheduler"]

@deprecated("compression is prepared by `shardwise.compression.init_compression` (deepspeed.compression.compress), by hooks on the model's own layers")
class compression_scheduler:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
