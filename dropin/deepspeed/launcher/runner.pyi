from typing import Any, NoReturn

from typing_extensions import deprecated

from shardwise_deepspeed.launcher import DEEPSPEED_ENVIRONMENT_NAME as DEEPSPEED_ENVIRONMENT_NAME
from shardwise_deepspeed.constants import DLTS_HOSTFILE as DLTS_HOSTFILE
from shardwise_deepspeed.launcher import fetch_hostfile as fetch_hostfile
from shardwise_deepspeed.launcher import main as main
from shardwise_deepspeed.tuning import run_autotuning as run_autotuning

__all__ = ["DEEPSPEED_ENVIRONMENT_NAME", "DLTS_HOSTFILE", "EXPORT_ENVS", "apply_num_nodes_and_gpus", "encode_world_info", "fetch_hostfile", "main", "parse_args", "parse_inclusion_exclusion", "parse_node_config", "parse_node_config_list", "parse_num_nodes", "parse_resource_filter", "run_autotuning"]

EXPORT_ENVS: object
@deprecated('processes are started by `shardwise run`, on one machine or several')
def apply_num_nodes_and_gpus(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('processes are started by `shardwise run`, on one machine or several')
def encode_world_info(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('processes are started by `shardwise run`, on one machine or several')
def parse_args(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('processes are started by `shardwise run`, on one machine or several')
def parse_inclusion_exclusion(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('processes are started by `shardwise run`, on one machine or several')
def parse_node_config(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('processes are started by `shardwise run`, on one machine or several')
def parse_node_config_list(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('processes are started by `shardwise run`, on one machine or several')
def parse_num_nodes(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('processes are started by `shardwise run`, on one machine or several')
def parse_resource_filter(*args: Any, **kwargs: Any) -> NoReturn: ...
