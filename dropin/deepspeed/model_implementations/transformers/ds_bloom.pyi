from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["DeepSpeedBloomInference"]

@deprecated('inference is not built yet')
class DeepSpeedBloomInference:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
