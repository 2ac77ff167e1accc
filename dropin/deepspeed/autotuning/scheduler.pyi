from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["ResourceManager"]

@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
class ResourceManager:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
