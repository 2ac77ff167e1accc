from typing import Any, NoReturn

from typing_extensions import deprecated

from shardwise_deepspeed.building import is_zero_param as is_zero_param

__all__ = ["DeepSpeedZeRoOffload", "FWD_MODULE_STACK", "ZeROOrderedDict", "ensure_zero_ordered_dict", "is_zero_param"]

@deprecated('it is an inner part of DeepSpeed: here all ZeRO stages are one code path, without wrappers of optimizers')
class DeepSpeedZeRoOffload:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
FWD_MODULE_STACK: object
@deprecated('it is an inner part of DeepSpeed: here all ZeRO stages are one code path, without wrappers of optimizers')
class ZeROOrderedDict:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('it is an inner part of DeepSpeed: here all ZeRO stages are one code path, without wrappers of optimizers')
def ensure_zero_ordered_dict(*args: Any, **kwargs: Any) -> NoReturn: ...
