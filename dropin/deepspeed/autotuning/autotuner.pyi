from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["Autotuner"]

@deprecated('the autotuner is not built yet')
class Autotuner:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
