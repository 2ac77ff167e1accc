from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["RandomLayerTokenDrop"]

@deprecated('data efficiency (curriculum, dropping of layers or of their tokens, data analysis) is not built yet')
class RandomLayerTokenDrop:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
