from shardwise_deepspeed.accelerator import Accelerator as DeepSpeedAccelerator

__all__ = ["DeepSpeedAccelerator"]
