from shardwise_deepspeed.optimizers import FusedAdam as FusedAdam

__all__ = ["FusedAdam"]
