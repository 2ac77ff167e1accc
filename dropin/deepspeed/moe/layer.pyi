from shardwise_deepspeed.experts import MoE as MoE

__all__ = ["MoE"]
