from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["DeepSpeedDiffusersAttention"]

@deprecated('inference is not built yet')
class DeepSpeedDiffusersAttention:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
