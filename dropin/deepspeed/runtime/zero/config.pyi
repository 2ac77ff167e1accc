from typing import Any, NoReturn

from typing_extensions import deprecated

from shardwise.config.schema import ZeroConfig as DeepSpeedZeroConfig
from shardwise.config.schema.offload import OffloadOptimizer as DeepSpeedZeroOffloadOptimizerConfig
from shardwise.config.schema.offload import OffloadParam as DeepSpeedZeroOffloadParamConfig
from shardwise_deepspeed.constants import OffloadDeviceEnum as OffloadDeviceEnum
from shardwise_deepspeed.constants import ZeroStageEnum as ZeroStageEnum

__all__ = ["DeepSpeedZeroConfig", "DeepSpeedZeroOffloadOptimizerConfig", "DeepSpeedZeroOffloadParamConfig", "OffloadDeviceEnum", "ZeroStageEnum", "get_zero_config", "read_zero_config_deprecated"]

@deprecated('it is an inner part of DeepSpeed: here all ZeRO stages are one code path, without wrappers of optimizers')
def get_zero_config(*args: Any, **kwargs: Any) -> NoReturn: ...
@deprecated('it is an inner part of DeepSpeed: here all ZeRO stages are one code path, without wrappers of optimizers')
def read_zero_config_deprecated(*args: Any, **kwargs: Any) -> NoReturn: ...
