from typing import Any, NoReturn

from typing_extensions import deprecated

from deepspeed.ops.quantizer import quantizer as quantizer

__all__ = ["ds_quantizer", "quantizer"]

@deprecated("compression is prepared by `shardwise.compression.init_compression` (deepspeed.compression.compress), by hooks on the model's own layers")
def ds_quantizer(*args: Any, **kwargs: Any) -> NoReturn: ...
