from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["DeepSpeedHybridEngine"]

@deprecated('the hybrid engine is not built yet')
class DeepSpeedHybridEngine:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
