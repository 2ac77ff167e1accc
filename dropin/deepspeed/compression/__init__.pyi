from typing import Any, NoReturn

from typing_extensions import deprecated

from deepspeed.compression import basic_layer as basic_layer
from deepspeed.compression import compress as compress
from deepspeed.compression import config as config
from deepspeed.compression import helper as helper
from deepspeed.compression import scheduler as scheduler
from deepspeed.compression import utils as utils

__all__ = ["basic_layer", "compress", "compression_scheduler", "config", "helper", "scheduler", "utils"]

@deprecated("compression is prepared by `shardwise.compression.init_compression` (deepspeed.compression.compress), by hooks on the model's own layers")
def compression_scheduler(*args: Any, **kwargs: Any) -> NoReturn: ...
