from typing import Any, NoReturn

from typing_extensions import deprecated

from shardwise.config.schema import ConfigSection as DeepSpeedConfigModel
from shardwise_deepspeed.configuration import dict_raise_error_on_duplicate_keys as dict_raise_error_on_duplicate_keys
from shardwise_deepspeed.configuration import get_dict_param as get_dict_param
from shardwise_deepspeed.configuration import get_list_param as get_list_param
from shardwise_deepspeed.configuration import get_scalar_param as get_scalar_param

__all__ = ["DeepSpeedConfigModel", "DeepSpeedConfigObject", "ScientificNotationEncoder", "dict_raise_error_on_duplicate_keys", "get_config_default", "get_dict_param", "get_list_param", "get_scalar_param", "pp_int"]

@deprecated('sections are pydantic models here (DeepSpeedConfigModel)')
class DeepSpeedConfigObject:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
class ScientificNotationEncoder:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def get_config_default(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def pp_int(*args: Any, **kwargs: Any) -> NoReturn: ...
