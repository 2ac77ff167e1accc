from deepspeed.ops.lion import cpu_lion as cpu_lion
from deepspeed.ops.lion import fused_lion as fused_lion
from deepspeed.ops.lion import multi_tensor_apply as multi_tensor_apply
from shardwise_deepspeed.optimizers import DeepSpeedCPULion as DeepSpeedCPULion
from shardwise_deepspeed.optimizers import FusedLion as FusedLion

__all__ = ["DeepSpeedCPULion", "FusedLion", "cpu_lion", "fused_lion", "multi_tensor_apply"]
