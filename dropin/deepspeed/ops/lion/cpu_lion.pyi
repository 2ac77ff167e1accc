from shardwise_deepspeed.optimizers import DeepSpeedCPULion as DeepSpeedCPULion

__all__ = ["DeepSpeedCPULion"]
