from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["Experts"]

@deprecated('tokens are sorted here, without matrices of tokens and places; `shardwise.moe.gates` and `dispatch` do it')
class Experts:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
