from shardwise.moe.layer import MoE as MoE

__all__ = ["MoE"]
