from typing import Any, NoReturn

from typing_extensions import deprecated

from deepspeed.compression import basic_layer as basic_layer
from deepspeed.compression import compress as compress
from deepspeed.compression import config as config
from deepspeed.compression import helper as helper
from deepspeed.compression import scheduler as scheduler
from deepspeed.compression import utils as utils

__all__ = ["basic_layer", "compress", "compression_scheduler", "config", "helper", "scheduler", "utils"]

@deprecated('compression of models (pruning, quantisation, eigenvalues of layers) is not built yet')
def compression_scheduler(*args: Any, **kwargs: Any) -> NoReturn: ...
