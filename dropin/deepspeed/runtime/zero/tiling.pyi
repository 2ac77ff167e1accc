from typing import Any, NoReturn

from typing_extensions import deprecated


__all__ = ["TiledLinear", "TiledLinearReturnBias", "split_tensor_along_last_dim"]

@deprecated('tiled linear layers are not built yet')
class TiledLinear:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('tiled linear layers are not built yet')
class TiledLinearReturnBias:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('it is an inner part of DeepSpeed: here all ZeRO stages are one code path, without wrappers of optimizers')
def split_tensor_along_last_dim(*args: Any, **kwargs: Any) -> NoReturn: ...
