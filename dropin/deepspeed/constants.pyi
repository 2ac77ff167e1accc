from typing import Any, NoReturn

from typing_extensions import deprecated

from shardwise_deepspeed.constants import TORCH_DISTRIBUTED_DEFAULT_PORT as TORCH_DISTRIBUTED_DEFAULT_PORT
from shardwise.comm.setup import DEFAULT_TIMEOUT as default_pg_timeout

__all__ = ["CROSS_RANK", "CROSS_SIZE", "TORCH_DISTRIBUTED_DEFAULT_PORT", "default_pg_timeout"]

CROSS_RANK: str
CROSS_SIZE: str
