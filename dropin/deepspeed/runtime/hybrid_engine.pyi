from shardwise_deepspeed.engine import DeepSpeedEngine as DeepSpeedHybridEngine

__all__ = ["DeepSpeedHybridEngine"]
