from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["AsymQuantizer", "BinaryQuantizer", "SymQuantizer", "TernaryQuantizer", "TopKBinarizer"]

@deprecated("compression is prepared by `shardwise.compression.init_compression` (deepspeed.compression.compress), by hooks on the model's own layers")
class AsymQuantizer:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("compression is prepared by `shardwise.compression.init_compression` (deepspeed.compression.compress), by hooks on the model's own layers")
class BinaryQuantizer:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("compression is prepared by `shardwise.compression.init_compression` (deepspeed.compression.compress), by hooks on the model's own layers")
class SymQuantizer:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("compression is prepared by `shardwise.compression.init_compression` (deepspeed.compression.compress), by hooks on the model's own layers")
class TernaryQuantizer:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("compression is prepared by `shardwise.compression.init_compression` (deepspeed.compression.compress), by hooks on the model's own layers")
class TopKBinarizer:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
