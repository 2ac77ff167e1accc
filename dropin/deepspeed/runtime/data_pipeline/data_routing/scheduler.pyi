from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["BaseScheduler", "RandomLTDScheduler"]

@deprecated('data efficiency (curriculum, dropping of layers or of their tokens, data analysis) is not built yet')
class BaseScheduler:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('data efficiency (curriculum, dropping of layers or of their tokens, data analysis) is not built yet')
class RandomLTDScheduler:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
