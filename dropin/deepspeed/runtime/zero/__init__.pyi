from typing import Any, NoReturn

from typing_extensions import deprecated

from deepspeed.runtime.zero import config as config
from deepspeed.runtime.zero import contiguous_memory_allocator as contiguous_memory_allocator
from deepspeed.runtime.zero import leaf_module_config as leaf_module_config
from deepspeed.runtime.zero import linear as linear
from deepspeed.runtime.zero import mics as mics
from deepspeed.runtime.zero import mics_utils as mics_utils
from deepspeed.runtime.zero import muon as muon
from deepspeed.runtime.zero import offload_config as offload_config
from deepspeed.runtime.zero import offload_states as offload_states
from deepspeed.runtime.zero import parameter_offload as parameter_offload
from deepspeed.runtime.zero import partition_parameters as partition_parameters
from deepspeed.runtime.zero import partitioned_param_coordinator as partitioned_param_coordinator
from deepspeed.runtime.zero import partitioned_param_profiler as partitioned_param_profiler
from deepspeed.runtime.zero import stage3 as stage3
from deepspeed.runtime.zero import stage_1_and_2 as stage_1_and_2
from deepspeed.runtime.zero import tiling as tiling
from deepspeed.runtime.zero import utils as utils
from shardwise.zero import GatheredParameters as GatheredParameters
from shardwise.zero import Init as Init
from shardwise_deepspeed.building import MiCS_Init as MiCS_Init
from shardwise.zero.units.status import ZeroParamStatus as ZeroParamStatus
from shardwise.zero import register_external_parameter as register_external_parameter
from shardwise_deepspeed.building import unwrap_model_for_generation as unwrap_model_for_generation

__all__ = ["DeepSpeedTensorOverride", "DeepSpeedZeRoOffload", "GatheredParameters", "Init", "MiCS_Init", "TiledLinear", "TiledLinearReturnBias", "ZeroParamStatus", "ZeroParamType", "config", "contiguous_memory_allocator", "leaf_module_config", "linear", "mics", "mics_utils", "muon", "offload_config", "offload_states", "parameter_offload", "partition_parameters", "partitioned_param_coordinator", "partitioned_param_profiler", "register_external_parameter", "stage3", "stage_1_and_2", "tiling", "unwrap_model_for_generation", "utils"]

@deprecated('it is an inner part of DeepSpeed: here all ZeRO stages are one code path, without wrappers of optimizers')
class DeepSpeedTensorOverride:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('it is an inner part of DeepSpeed: here all ZeRO stages are one code path, without wrappers of optimizers')
class DeepSpeedZeRoOffload:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('tiled linear layers are not built yet')
class TiledLinear:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('tiled linear layers are not built yet')
class TiledLinearReturnBias:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('it is an inner part of DeepSpeed: here all ZeRO stages are one code path, without wrappers of optimizers')
class ZeroParamType:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
