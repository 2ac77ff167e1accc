from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["SparseSelfAttention"]

@deprecated('sparse attention is not built yet')
class SparseSelfAttention:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
