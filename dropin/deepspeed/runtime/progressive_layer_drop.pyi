from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["ProgressiveLayerDrop"]

@deprecated('data efficiency (curriculum, dropping of layers or of their tokens, data analysis) is not built yet')
class ProgressiveLayerDrop:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
