from typing import Any, NoReturn

from typing_extensions import deprecated

from shardwise.zero import GatheredParameters as GatheredParameters
from shardwise.zero import Init as Init
from shardwise_deepspeed.building import MiCS_Init as MiCS_Init
from torch.nn import Parameter as Parameter
from torch import Tensor as Tensor
from shardwise.zero.units.status import ZeroParamStatus as ZeroParamStatus
from shardwise_deepspeed.building import _orig_torch_arange as _orig_torch_arange
from shardwise_deepspeed.accelerator import get_accelerator as get_accelerator
from shardwise_deepspeed.building import is_zero_param as is_zero_param
from shardwise.zero import register_external_parameter as register_external_parameter
from shardwise.zero import unregister_external_parameter as unregister_external_parameter
from shardwise_deepspeed.building import unwrap_model_for_generation as unwrap_model_for_generation
from shardwise_deepspeed.building import zero_wrapper_for_fp_tensor_constructor as zero_wrapper_for_fp_tensor_constructor

__all__ = ["AllGatherCoalescedHandle", "AllGatherHandle", "AllReduceCoalescedHandle", "CUDAQuantizer", "DeepSpeedTensorOverride", "DeepSpeedZeRoOffload", "GatheredParameters", "Init", "InsertPostInitMethodToModuleSubClasses", "MiCS_Init", "MultipleAllGatherHandles", "NoGatherCoalescedHandle", "NoGatherHandle", "Parameter", "PartitionedParamStatus", "QuantizationInfo", "Tensor", "TiledLinear", "TiledLinearReturnBias", "ZeroParamStatus", "ZeroParamType", "_orig_torch_arange", "debug_rank0", "free_param", "get_accelerator", "get_all_subclasses", "get_allgather_dtype", "get_new_tensor_fn_for_dtype", "is_zero_param", "print_rank_0", "register_external_parameter", "restore_init_context", "shutdown_init_context", "unregister_external_parameter", "unwrap_model_for_generation", "zero_wrapper_for_fp_tensor_constructor"]

@deprecated('it is an inner part of DeepSpeed: here all ZeRO stages are one code path, without wrappers of optimizers')
class AllGatherCoalescedHandle:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('it is an inner part of DeepSpeed: here all ZeRO stages are one code path, without wrappers of optimizers')
class AllGatherHandle:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('it is an inner part of DeepSpeed: here all ZeRO stages are one code path, without wrappers of optimizers')
class AllReduceCoalescedHandle:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('it is an inner part of DeepSpeed: here all ZeRO stages are one code path, without wrappers of optimizers')
class CUDAQuantizer:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('it is an inner part of DeepSpeed: here all ZeRO stages are one code path, without wrappers of optimizers')
class DeepSpeedTensorOverride:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('it is an inner part of DeepSpeed: here all ZeRO stages are one code path, without wrappers of optimizers')
class DeepSpeedZeRoOffload:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('it is an inner part of DeepSpeed: here all ZeRO stages are one code path, without wrappers of optimizers')
class InsertPostInitMethodToModuleSubClasses:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('it is an inner part of DeepSpeed: here all ZeRO stages are one code path, without wrappers of optimizers')
class MultipleAllGatherHandles:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('it is an inner part of DeepSpeed: here all ZeRO stages are one code path, without wrappers of optimizers')
class NoGatherCoalescedHandle:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('it is an inner part of DeepSpeed: here all ZeRO stages are one code path, without wrappers of optimizers')
class NoGatherHandle:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('it is an inner part of DeepSpeed: here all ZeRO stages are one code path, without wrappers of optimizers')
class PartitionedParamStatus:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('it is an inner part of DeepSpeed: here all ZeRO stages are one code path, without wrappers of optimizers')
class QuantizationInfo:
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
@deprecated('it is an inner part of DeepSpeed: here all ZeRO stages are one code path, without wrappers of optimizers')
def debug_rank0(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed: here all ZeRO stages are one code path, without wrappers of optimizers')
def free_param(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed: here all ZeRO stages are one code path, without wrappers of optimizers')
def get_all_subclasses(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed: here all ZeRO stages are one code path, without wrappers of optimizers')
def get_allgather_dtype(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed: here all ZeRO stages are one code path, without wrappers of optimizers')
def get_new_tensor_fn_for_dtype(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed: here all ZeRO stages are one code path, without wrappers of optimizers')
def print_rank_0(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('initialize() suspends an open zero.Init by itself')
def restore_init_context(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('initialize() suspends an open zero.Init by itself')
def shutdown_init_context(*args: Any, **kwargs: Any) -> NoReturn: ...
