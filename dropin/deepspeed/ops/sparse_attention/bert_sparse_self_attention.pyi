from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["BertSparseSelfAttention"]

@deprecated('sparse attention is not built yet')
class BertSparseSelfAttention:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
