from typing import Any, NoReturn

from typing_extensions import deprecated

from shardwise.config.schema.offload import OffloadOptimizer as DeepSpeedZeroOffloadOptimizerConfig
from shardwise.config.schema.offload import OffloadParam as DeepSpeedZeroOffloadParamConfig
from shardwise_deepspeed.constants import OffloadDeviceEnum as OffloadDeviceEnum
from shardwise.zero import OffloadStateTypeEnum as OffloadStateTypeEnum

__all__ = ["DeepSpeedZeroOffloadOptimizerConfig", "DeepSpeedZeroOffloadParamConfig", "OffloadDeviceEnum", "OffloadStateTypeEnum", "resolve_nvme_path"]

@deprecated('it is an inner part of DeepSpeed: here state is kept on disks by `shardwise.offload`, requested by zero_optimization.offload_optimizer and offload_param')
def resolve_nvme_path(*args: Any, **kwargs: Any) -> NoReturn: ...
