from typing import Any, NoReturn

from typing_extensions import deprecated

from shardwise_deepspeed.compression import convert_conv1d_to_linear as convert_conv1d_to_linear
from shardwise_deepspeed.helpers import recursive_getattr as recursive_getattr
from shardwise_deepspeed.helpers import recursive_setattr as recursive_setattr

__all__ = ["compression_preparation", "convert_conv1d_to_linear", "fix_compression", "generate_pruners", "is_module_compressible", "module_replacement", "recursive_getattr", "recursive_setattr", "register_on_step_begin", "rewrite_optimizer_step"]

@deprecated("compression is prepared by `shardwise.compression.init_compression` (deepspeed.compression.compress), by hooks on the model's own layers")
def compression_preparation(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated("compression is prepared by `shardwise.compression.init_compression` (deepspeed.compression.compress), by hooks on the model's own layers")
def fix_compression(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated("compression is prepared by `shardwise.compression.init_compression` (deepspeed.compression.compress), by hooks on the model's own layers")
def generate_pruners(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated("compression is prepared by `shardwise.compression.init_compression` (deepspeed.compression.compress), by hooks on the model's own layers")
def is_module_compressible(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated("compression is prepared by `shardwise.compression.init_compression` (deepspeed.compression.compress), by hooks on the model's own layers")
def module_replacement(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated("compression is prepared by `shardwise.compression.init_compression` (deepspeed.compression.compress), by hooks on the model's own layers")
def register_on_step_begin(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated("compression is prepared by `shardwise.compression.init_compression` (deepspeed.compression.compress), by hooks on the model's own layers")
def rewrite_optimizer_step(*args: Any, **kwargs: Any) -> NoReturn: ...
