from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["ColumnParallelLinear", "RowParallelLinear"]

@deprecated("layers are divided in place, as `tensor_parallel` of the configuration or the model's own plan says (shardwise.tp_model_init); there are no policies or classes to build them of")
class ColumnParallelLinear:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated("layers are divided in place, as `tensor_parallel` of the configuration or the model's own plan says (shardwise.tp_model_init); there are no policies or classes to build them of")
class RowParallelLinear:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
