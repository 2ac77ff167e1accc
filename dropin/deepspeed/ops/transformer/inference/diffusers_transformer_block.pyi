from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["DeepSpeedDiffusersTransformerBlock"]

@deprecated('inference is not built yet')
class DeepSpeedDiffusersTransformerBlock:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
