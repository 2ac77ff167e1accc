from typing import Any, NoReturn

from typing_extensions import deprecated

from deepspeed.ops.adam import cpu_adam as cpu_adam
from deepspeed.ops.adam import fused_adam as fused_adam
from deepspeed.ops.adam import multi_tensor_apply as multi_tensor_apply
from deepspeed.ops.adam import zenflow_cpu_adam as zenflow_cpu_adam
from deepspeed.ops.adam import zenflow_torch_adam as zenflow_torch_adam
from shardwise_deepspeed.optimizers import DeepSpeedCPUAdam as DeepSpeedCPUAdam
from shardwise_deepspeed.optimizers import FusedAdam as FusedAdam

__all__ = ["DeepSpeedCPUAdam", "FusedAdam", "ZenFlowCPUAdam", "ZenFlowSelectiveAdamW", "ZenFlowSelectiveAdamW_stage3", "cpu_adam", "fused_adam", "multi_tensor_apply", "zenflow_cpu_adam", "zenflow_torch_adam"]

@deprecated('ZenFlow, which steps a part of the gradients some steps late, is not built yet')
class ZenFlowCPUAdam:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('ZenFlow, which steps a part of the gradients some steps late, is not built yet')
class ZenFlowSelectiveAdamW:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
@deprecated('ZenFlow, which steps a part of the gradients some steps late, is not built yet')
class ZenFlowSelectiveAdamW_stage3:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
