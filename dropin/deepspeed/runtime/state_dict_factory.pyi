from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["MegatronSDLoader", "SDLoaderBase", "SDLoaderFactory"]

@deprecated('inference is not built yet')
class MegatronSDLoader:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('inference is not built yet')
class SDLoaderBase:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('inference is not built yet')
class SDLoaderFactory:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
