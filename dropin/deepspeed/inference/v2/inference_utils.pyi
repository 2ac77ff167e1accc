from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["ActivationType", "DtypeEnum", "NormTypeEnum", "ceil_div"]

@deprecated('inference is not built yet')
class ActivationType:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('inference is not built yet')
class DtypeEnum:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('inference is not built yet')
class NormTypeEnum:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('inference is not built yet')
def ceil_div(*args: Any, **kwargs: Any) -> NoReturn: ...
