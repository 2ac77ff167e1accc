from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["SparseAttentionUtils"]

@deprecated('sparse attention is not built yet')
class SparseAttentionUtils:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
