from typing import Any, NoReturn

from typing_extensions import deprecated

from deepspeed.runtime.swap_tensor import aio_config as aio_config
from deepspeed.runtime.swap_tensor import async_swapper as async_swapper
from deepspeed.runtime.swap_tensor import constants as constants
from deepspeed.runtime.swap_tensor import optimizer_utils as optimizer_utils
from deepspeed.runtime.swap_tensor import partitioned_optimizer_swapper as partitioned_optimizer_swapper
from deepspeed.runtime.swap_tensor import partitioned_param_swapper as partitioned_param_swapper
from deepspeed.runtime.swap_tensor import pipelined_optimizer_swapper as pipelined_optimizer_swapper
from deepspeed.runtime.swap_tensor import utils as utils

__all__ = ["MIN_SWAPPABLE_BYTES", "aio_config", "async_swapper", "constants", "optimizer_utils", "partitioned_optimizer_swapper", "partitioned_param_swapper", "pipelined_optimizer_swapper", "utils"]

MIN_SWAPPABLE_BYTES: object
