from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["ResourceManager"]

@deprecated('the autotuner is not built yet')
class ResourceManager:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
