from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["SparseTensor"]

@deprecated('sparse gradients are made dense before they are reduced')
class SparseTensor:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
