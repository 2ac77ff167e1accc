from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["DSStateManager", "DSStateManagerConfig", "RaggedBatchWrapper"]

@deprecated('inference is not built yet')
class DSStateManager:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('inference is not built yet')
class DSStateManagerConfig:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('inference is not built yet')
class RaggedBatchWrapper:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
