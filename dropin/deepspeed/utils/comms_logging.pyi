from typing import Any, NoReturn

from typing_extensions import deprecated

from shardwise.comm.logger import CommsLogger as CommsLogger
from shardwise_deepspeed.collectives import calc_bw_log as calc_bw_log
from shardwise_deepspeed.collectives import convert_size as convert_size

__all__ = ["CommsLogger", "calc_bw_log", "convert_size", "get_caller_func", "print_rank_0"]

@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def get_caller_func(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def print_rank_0(*args: Any, **kwargs: Any) -> NoReturn: ...
