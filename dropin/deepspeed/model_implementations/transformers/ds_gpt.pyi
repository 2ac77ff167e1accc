from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["DeepSpeedGPTInference"]

@deprecated('inference is not built yet')
class DeepSpeedGPTInference:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
