from typing import Any, NoReturn

from typing_extensions import deprecated

from shardwise_deepspeed.configuration import load_ds_config as load_ds_config

__all__ = ["infer_config_dtype", "load_ds_config", "merge_tp_model_init_into_config", "record_tp_model_init_args", "tp_group_world_size"]

@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def infer_config_dtype(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def merge_tp_model_init_into_config(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def record_tp_model_init_args(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
def tp_group_world_size(*args: Any, **kwargs: Any) -> NoReturn: ...
