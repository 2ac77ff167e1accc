from typing import Any, NoReturn

from typing_extensions import deprecated

from shardwise_deepspeed.groups import _get_data_parallel_group as _get_data_parallel_group
from shardwise_deepspeed.groups import _get_data_parallel_rank as _get_data_parallel_rank
from shardwise_deepspeed.groups import _get_data_parallel_world_size as _get_data_parallel_world_size
from shardwise_deepspeed.groups import _get_sequence_data_parallel_group as _get_sequence_data_parallel_group
from shardwise_deepspeed.groups import _get_sequence_data_parallel_rank as _get_sequence_data_parallel_rank
from shardwise_deepspeed.groups import _get_sequence_data_parallel_world_size as _get_sequence_data_parallel_world_size
from shardwise_deepspeed.groups import _get_sequence_parallel_group as _get_sequence_parallel_group
from shardwise_deepspeed.groups import _get_sequence_parallel_rank as _get_sequence_parallel_rank
from shardwise_deepspeed.groups import _get_sequence_parallel_world_size as _get_sequence_parallel_world_size
from shardwise_deepspeed.groups import get_data_parallel_group as get_data_parallel_group
from shardwise_deepspeed.groups import get_data_parallel_rank as get_data_parallel_rank
from shardwise_deepspeed.groups import get_data_parallel_world_size as get_data_parallel_world_size
from shardwise_deepspeed.groups import get_model_parallel_group as get_model_parallel_group
from shardwise_deepspeed.groups import get_model_parallel_rank as get_model_parallel_rank
from shardwise_deepspeed.groups import get_model_parallel_world_size as get_model_parallel_world_size
from shardwise_deepspeed.groups import get_tensor_parallel_group as get_tensor_model_parallel_group
from shardwise_deepspeed.groups import get_tensor_parallel_rank as get_tensor_model_parallel_rank
from shardwise_deepspeed.groups import get_tensor_parallel_world_size as get_tensor_model_parallel_world_size
from shardwise_deepspeed.groups import get_tensor_parallel_group as get_tensor_parallel_group
from shardwise_deepspeed.groups import get_tensor_parallel_rank as get_tensor_parallel_rank
from shardwise_deepspeed.groups import get_tensor_parallel_world_size as get_tensor_parallel_world_size
from shardwise_deepspeed.groups import initialize as initialize
from shardwise_deepspeed.groups import mesh_device as mesh_device
from shardwise_deepspeed.groups import mpu as mpu

__all__ = ["_get_data_parallel_group", "_get_data_parallel_rank", "_get_data_parallel_world_size", "_get_expert_data_parallel_group", "_get_expert_data_parallel_rank", "_get_expert_data_parallel_world_size", "_get_expert_parallel_group", "_get_expert_parallel_rank", "_get_expert_parallel_world_size", "_get_max_expert_size", "_get_max_expert_size_name", "_get_sequence_data_parallel_group", "_get_sequence_data_parallel_rank", "_get_sequence_data_parallel_world_size", "_get_sequence_parallel_group", "_get_sequence_parallel_rank", "_get_sequence_parallel_world_size", "_get_zero_param_intra_parallel_group", "_get_zero_param_parallel_group", "get_data_parallel_group", "get_data_parallel_rank", "get_data_parallel_world_size", "get_model_parallel_group", "get_model_parallel_rank", "get_model_parallel_world_size", "get_tensor_model_parallel_group", "get_tensor_model_parallel_rank", "get_tensor_model_parallel_src_rank", "get_tensor_model_parallel_world_size", "get_tensor_parallel_group", "get_tensor_parallel_rank", "get_tensor_parallel_world_size", "initialize", "mesh_device", "mpu", "set_data_parallel_group", "set_data_parallel_rank", "set_data_parallel_world_size", "set_model_parallel_group", "set_model_parallel_rank", "set_model_parallel_world_size", "set_tensor_model_parallel_rank", "set_tensor_model_parallel_world_size", "set_tensor_parallel_group", "set_tensor_parallel_rank", "set_tensor_parallel_world_size"]

@deprecated('an engine makes the groups of its layers: engine.expert_parallel_group has them')
def _get_expert_data_parallel_group(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('an engine makes the groups of its layers: engine.expert_parallel_group has them')
def _get_expert_data_parallel_rank(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('an engine makes the groups of its layers: engine.expert_parallel_group has them')
def _get_expert_data_parallel_world_size(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('an engine makes the groups of its layers: engine.expert_parallel_group has them')
def _get_expert_parallel_group(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('an engine makes the groups of its layers: engine.expert_parallel_group has them')
def _get_expert_parallel_rank(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('an engine makes the groups of its layers: engine.expert_parallel_group has them')
def _get_expert_parallel_world_size(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('an engine makes the groups of its layers: engine.expert_parallel_group has them')
def _get_max_expert_size(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('an engine makes the groups of its layers: engine.expert_parallel_group has them')
def _get_max_expert_size_name(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated("it is set by zero_optimization.zero_hpz_partition_size, and is the engine's own")
def _get_zero_param_intra_parallel_group(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated("it is set by zero_optimization.zero_hpz_partition_size, and is the engine's own")
def _get_zero_param_parallel_group(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def get_tensor_model_parallel_src_rank(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('groups are those of an engine, of tp_model_init or of `mpu`; they are not set')
def set_data_parallel_group(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('groups are those of an engine, of tp_model_init or of `mpu`; they are not set')
def set_data_parallel_rank(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('groups are those of an engine, of tp_model_init or of `mpu`; they are not set')
def set_data_parallel_world_size(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('groups are those of an engine, of tp_model_init or of `mpu`; they are not set')
def set_model_parallel_group(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('groups are those of an engine, of tp_model_init or of `mpu`; they are not set')
def set_model_parallel_rank(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('groups are those of an engine, of tp_model_init or of `mpu`; they are not set')
def set_model_parallel_world_size(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def set_tensor_model_parallel_rank(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def set_tensor_model_parallel_world_size(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('groups are those of an engine, of tp_model_init or of `mpu`; they are not set')
def set_tensor_parallel_group(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('groups are those of an engine, of tp_model_init or of `mpu`; they are not set')
def set_tensor_parallel_rank(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('groups are those of an engine, of tp_model_init or of `mpu`; they are not set')
def set_tensor_parallel_world_size(*args: Any, **kwargs: Any) -> NoReturn: ...
