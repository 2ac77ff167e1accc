from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["DeepSpeedTransformerInference"]

@deprecated('inference is not built yet')
class DeepSpeedTransformerInference:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
