from typing import Any, NoReturn

from typing_extensions import deprecated

from shardwise_deepspeed.configuration import get_bfloat16_config as get_bfloat16_config
from shardwise_deepspeed.configuration import get_float16_config as get_float16_config

__all__ = ["DeepSpeedBF16Config", "DeepSpeedFP16Config", "get_bfloat16_config", "get_float16_config"]

@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
class DeepSpeedBF16Config:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('it is an inner part of DeepSpeed, which has no counterpart here')
class DeepSpeedFP16Config:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
