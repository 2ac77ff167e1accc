from shardwise_deepspeed.operators import ALL_OPS as ALL_OPS

__all__ = ["ALL_OPS"]
