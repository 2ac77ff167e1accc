from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["DeepSpeedStaticCache", "DeepSpeedStaticLayer"]

@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
class DeepSpeedStaticCache:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
class DeepSpeedStaticLayer:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
