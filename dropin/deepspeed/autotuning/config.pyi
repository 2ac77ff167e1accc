from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["DeepSpeedAutotuningConfig"]

@deprecated('sections are pydantic models here (DeepSpeedConfigModel)')
class DeepSpeedAutotuningConfig:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
