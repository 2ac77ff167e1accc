from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["CommsConfig", "CommsLoggerConfig", "DeepSpeedCommsConfig"]

@deprecated("it is one of DeepSpeed's own backends: torch.distributed's process groups are used as they are")
class CommsConfig:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("it is one of DeepSpeed's own backends: torch.distributed's process groups are used as they are")
class CommsLoggerConfig:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("it is one of DeepSpeed's own backends: torch.distributed's process groups are used as they are")
class DeepSpeedCommsConfig:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
