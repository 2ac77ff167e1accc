from typing import Any, NoReturn

from typing_extensions import deprecated

from shardwise_deepspeed.groups import get_model_parallel_group as get_model_parallel_group
from shardwise_deepspeed.groups import get_model_parallel_rank as get_model_parallel_rank
from shardwise_deepspeed.groups import get_model_parallel_world_size as get_model_parallel_world_size
from shardwise_deepspeed.sequences import get_sequence_parallel_group as get_sequence_parallel_group
from shardwise_deepspeed.sequences import get_sequence_parallel_rank as get_sequence_parallel_rank
from shardwise_deepspeed.sequences import get_sequence_parallel_world_size as get_sequence_parallel_world_size
from shardwise_deepspeed.sequences import initialize_sequence_parallel as initialize_sequence_parallel

__all__ = ["get_model_parallel_group", "get_model_parallel_rank", "get_model_parallel_world_size", "get_sequence_data_parallel_group", "get_sequence_data_parallel_rank", "get_sequence_data_parallel_world_size", "get_sequence_parallel_group", "get_sequence_parallel_rank", "get_sequence_parallel_world_size", "initialize_sequence_parallel"]

@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def get_sequence_data_parallel_group(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def get_sequence_data_parallel_rank(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def get_sequence_data_parallel_world_size(*args: Any, **kwargs: Any) -> NoReturn: ...
