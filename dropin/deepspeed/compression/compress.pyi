from typing import Any, NoReturn

from typing_extensions import deprecated

from shardwise_deepspeed.compression import init_compression as init_compression
from shardwise_deepspeed.compression import redundancy_clean as redundancy_clean
from shardwise_deepspeed.compression import student_initialization as student_initialization

__all__ = ["check_deepspeed_config", "get_compress_methods", "get_module_name", "init_compression", "redundancy_clean", "student_initialization"]

@deprecated("compression is prepared by `shardwise.compression.init_compression` (deepspeed.compression.compress), by hooks on the model's own layers")
def check_deepspeed_config(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated("compression is prepared by `shardwise.compression.init_compression` (deepspeed.compression.compress), by hooks on the model's own layers")
def get_compress_methods(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated("compression is prepared by `shardwise.compression.init_compression` (deepspeed.compression.compress), by hooks on the model's own layers")
def get_module_name(*args: Any, **kwargs: Any) -> NoReturn: ...
