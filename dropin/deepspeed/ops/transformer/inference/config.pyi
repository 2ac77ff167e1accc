from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["DeepSpeedInferenceConfig"]

@deprecated('inference is not built yet')
class DeepSpeedInferenceConfig:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
