from typing import Any, NoReturn

from typing_extensions import deprecated

from deepspeed.utils import bwc as bwc
from deepspeed.utils import comms_logging as comms_logging
from deepspeed.utils import config as config
from deepspeed.utils import debug as debug
from deepspeed.utils import distributed as distributed
from deepspeed.utils import exceptions as exceptions
from deepspeed.utils import groups as groups
from deepspeed.utils import init_on_device as init_on_device
from deepspeed.utils import logging as logging
from deepspeed.utils import mixed_precision_linkage as mixed_precision_linkage
from deepspeed.utils import module_utils as module_utils
from deepspeed.utils import numa as numa
from deepspeed.utils import nvtx as nvtx
from deepspeed.utils import pin_memory as pin_memory
from deepspeed.utils import pin_memory_tracker as pin_memory_tracker
from deepspeed.utils import static_cache as static_cache
from deepspeed.utils import timer as timer
from deepspeed.utils import torch as torch
from deepspeed.utils import types as types
from deepspeed.utils import zero_to_fp32 as zero_to_fp32
from deepspeed.utils import zero_to_torch as zero_to_torch
from shardwise_deepspeed.building import OnDevice as OnDevice
from shardwise.data import RepeatingLoader as RepeatingLoader
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
from shardwise.zero.units.leaves import get_z3_leaf_modules as get_z3_leaf_modules
from shardwise_deepspeed.groups import initialize as initialize
from shardwise.utils.nvtx import instrument_w_nvtx as instrument_w_nvtx
from shardwise_deepspeed.collectives import is_initialized as is_initialized
from shardwise_deepspeed.logs import log_dist as log_dist
from shardwise_deepspeed.logs import log_dist_once as log_dist_once
from shardwise_deepspeed.logs import logger as logger
from shardwise_deepspeed.groups import mesh_device as mesh_device
from shardwise_deepspeed.groups import mpu as mpu
from shardwise.zero.access import safe_get_full_fp32_param as safe_get_full_fp32_param
from shardwise.zero.access import safe_get_full_grad as safe_get_full_grad
from shardwise.zero.access import safe_get_full_optimizer_state as safe_get_full_optimizer_state
from shardwise.zero.access import safe_get_local_fp32_param as safe_get_local_fp32_param
from shardwise.zero.access import safe_get_local_grad as safe_get_local_grad
from shardwise.zero.access import safe_get_local_optimizer_state as safe_get_local_optimizer_state
from shardwise.zero.access import safe_set_full_fp32_param as safe_set_full_fp32_param
from shardwise.zero.access import safe_set_full_grad as safe_set_full_grad
from shardwise.zero.access import safe_set_full_optimizer_state as safe_set_full_optimizer_state
from shardwise.zero.access import safe_set_local_fp32_param as safe_set_local_fp32_param
from shardwise.zero.access import safe_set_local_grad as safe_set_local_grad
from shardwise.zero.access import safe_set_local_optimizer_state as safe_set_local_optimizer_state
from shardwise.zero.access import safe_update_full_grad_vectorized as safe_update_full_grad_vectorized
from shardwise_deepspeed.logs import set_log_level_from_string as set_log_level_from_string
from shardwise.zero.units.leaves import set_z3_leaf_module as set_z3_leaf_module
from shardwise.zero.units.leaves import set_z3_leaf_modules as set_z3_leaf_modules
from shardwise.zero.units.leaves import set_z3_leaf_modules_by_name as set_z3_leaf_modules_by_name
from shardwise.zero.units.leaves import set_z3_leaf_modules_by_suffix as set_z3_leaf_modules_by_suffix
from shardwise.zero.units.leaves import unset_z3_leaf_modules as unset_z3_leaf_modules
from shardwise.zero.units.leaves import z3_leaf_module as z3_leaf_module

__all__ = ["OnDevice", "RepeatingLoader", "_get_data_parallel_group", "_get_data_parallel_rank", "_get_data_parallel_world_size", "_get_expert_data_parallel_group", "_get_expert_data_parallel_rank", "_get_expert_data_parallel_world_size", "_get_expert_parallel_group", "_get_expert_parallel_rank", "_get_expert_parallel_world_size", "_get_max_expert_size", "_get_max_expert_size_name", "_get_sequence_data_parallel_group", "_get_sequence_data_parallel_rank", "_get_sequence_data_parallel_world_size", "_get_sequence_parallel_group", "_get_sequence_parallel_rank", "_get_sequence_parallel_world_size", "_get_zero_param_intra_parallel_group", "_get_zero_param_parallel_group", "bwc", "comms_logging", "config", "debug", "distributed", "exceptions", "fragment_address", "get_caller_func", "get_data_parallel_group", "get_data_parallel_rank", "get_data_parallel_world_size", "get_full_hp_grad", "get_full_hp_param", "get_hp_fragment_mapping", "get_model_parallel_group", "get_model_parallel_rank", "get_model_parallel_world_size", "get_numactl_cmd", "get_tensor_model_parallel_group", "get_tensor_model_parallel_rank", "get_tensor_model_parallel_world_size", "get_tensor_parallel_group", "get_tensor_parallel_rank", "get_tensor_parallel_world_size", "get_z3_leaf_modules", "groups", "init_on_device", "initialize", "instrument_w_nvtx", "is_initialized", "lazy_init_hp_params_optimizer_state", "link_hp_params", "log_dist", "log_dist_once", "logger", "logging", "map_to_flat_opt_states", "mesh_device", "mixed_precision_linkage", "module_utils", "mpu", "numa", "nvtx", "pin_memory", "pin_memory_tracker", "safe_get_full_fp32_param", "safe_get_full_grad", "safe_get_full_optimizer_state", "safe_get_local_fp32_param", "safe_get_local_grad", "safe_get_local_optimizer_state", "safe_set_full_fp32_param", "safe_set_full_grad", "safe_set_full_optimizer_state", "safe_set_local_fp32_param", "safe_set_local_grad", "safe_set_local_optimizer_state", "safe_update_full_grad_vectorized", "set_data_parallel_group", "set_data_parallel_rank", "set_data_parallel_world_size", "set_full_hp_grad", "set_full_hp_param", "set_log_level_from_string", "set_model_parallel_group", "set_model_parallel_rank", "set_model_parallel_world_size", "set_tensor_parallel_group", "set_tensor_parallel_rank", "set_tensor_parallel_world_size", "set_z3_leaf_module", "set_z3_leaf_modules", "set_z3_leaf_modules_by_name", "set_z3_leaf_modules_by_suffix", "static_cache", "tensor_fragment", "timer", "torch", "types", "unset_z3_leaf_modules", "z3_leaf_module", "z3_leaf_parameter", "zero_to_fp32", "zero_to_torch"]

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
class fragment_address:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def get_caller_func(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def get_full_hp_grad(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def get_full_hp_param(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def get_hp_fragment_mapping(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('the launcher binds processes to cores by itself (--bind_cores_to_rank), without numactl')
def get_numactl_cmd(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def lazy_init_hp_params_optimizer_state(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def link_hp_params(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def map_to_flat_opt_states(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('groups are those of an engine, of tp_model_init or of `mpu`; they are not set')
def set_data_parallel_group(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('groups are those of an engine, of tp_model_init or of `mpu`; they are not set')
def set_data_parallel_rank(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('groups are those of an engine, of tp_model_init or of `mpu`; they are not set')
def set_data_parallel_world_size(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def set_full_hp_grad(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def set_full_hp_param(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('groups are those of an engine, of tp_model_init or of `mpu`; they are not set')
def set_model_parallel_group(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('groups are those of an engine, of tp_model_init or of `mpu`; they are not set')
def set_model_parallel_rank(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('groups are those of an engine, of tp_model_init or of `mpu`; they are not set')
def set_model_parallel_world_size(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('groups are those of an engine, of tp_model_init or of `mpu`; they are not set')
def set_tensor_parallel_group(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('groups are those of an engine, of tp_model_init or of `mpu`; they are not set')
def set_tensor_parallel_rank(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('groups are those of an engine, of tp_model_init or of `mpu`; they are not set')
def set_tensor_parallel_world_size(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
class tensor_fragment:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def z3_leaf_parameter(*args: Any, **kwargs: Any) -> NoReturn: ...
