from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["BSLongformerSparsityConfig", "BigBirdSparsityConfig", "DenseSparsityConfig", "FixedSparsityConfig", "LocalSlidingWindowSparsityConfig", "SparsityConfig", "VariableSparsityConfig"]

@deprecated('sparse attention is not built yet')
class BSLongformerSparsityConfig:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('sparse attention is not built yet')
class BigBirdSparsityConfig:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('sparse attention is not built yet')
class DenseSparsityConfig:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('sparse attention is not built yet')
class FixedSparsityConfig:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('sparse attention is not built yet')
class LocalSlidingWindowSparsityConfig:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('sparse attention is not built yet')
class SparsityConfig:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('sparse attention is not built yet')
class VariableSparsityConfig:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
