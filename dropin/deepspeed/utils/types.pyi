from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["ActivationFuncType", "NormType"]

@deprecated('inference is not built yet')
class ActivationFuncType:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('inference is not built yet')
class NormType:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
