from typing import Any, NoReturn

from typing_extensions import deprecated

from shardwise_deepspeed.logs import LoggerFactory as LoggerFactory
from shardwise_deepspeed.logs import get_current_level as get_current_level
from shardwise_deepspeed.logs import log_dist as log_dist
from shardwise_deepspeed.logs import log_dist_once as log_dist_once
from shardwise_deepspeed.logs import logger as logger
from shardwise_deepspeed.logs import print_dist as print_dist
from shardwise_deepspeed.logs import print_json_dist as print_json_dist
from shardwise_deepspeed.logs import set_log_level_from_string as set_log_level_from_string
from shardwise_deepspeed.logs import should_log_le as should_log_le

__all__ = ["LoggerFactory", "get_current_level", "get_dist_msg", "get_log_level_from_string", "log_dist", "log_dist_once", "logger", "print_configuration", "print_dist", "print_json_dist", "set_log_level_from_string", "should_log_le"]

@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def get_dist_msg(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def get_log_level_from_string(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('`shardwise check` prints configurations')
def print_configuration(*args: Any, **kwargs: Any) -> NoReturn: ...
