from deepspeed.ops.lamb import fused_lamb as fused_lamb
from shardwise.optim import Lamb as FusedLamb

__all__ = ["FusedLamb", "fused_lamb"]
