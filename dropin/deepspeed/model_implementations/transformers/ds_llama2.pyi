from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["DeepSpeedLlama2Inference"]

@deprecated('inference is not built yet')
class DeepSpeedLlama2Inference:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
