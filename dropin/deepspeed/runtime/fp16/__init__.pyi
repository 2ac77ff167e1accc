from deepspeed.runtime.fp16 import fused_optimizer as fused_optimizer
from deepspeed.runtime.fp16 import loss_scaler as loss_scaler
from deepspeed.runtime.fp16 import onebit as onebit
from deepspeed.runtime.fp16 import unfused_optimizer as unfused_optimizer

__all__ = ["fused_optimizer", "loss_scaler", "onebit", "unfused_optimizer"]
