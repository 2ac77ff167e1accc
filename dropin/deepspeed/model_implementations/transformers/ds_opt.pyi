from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["DeepSpeedOPTInference"]

@deprecated('inference is not built yet')
class DeepSpeedOPTInference:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
