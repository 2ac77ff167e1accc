from shardwise_deepspeed.building import OnDevice as OnDevice

__all__ = ["OnDevice"]
