from shardwise_deepspeed.optimizers import FusedLion as FusedLion

__all__ = ["FusedLion"]
