from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["InferenceEngine"]

@deprecated('inference is not built yet')
class InferenceEngine:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
