from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["DeepSpeedAutotuningConfig"]

@deprecated('the autotuner is not built yet')
class DeepSpeedAutotuningConfig:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
