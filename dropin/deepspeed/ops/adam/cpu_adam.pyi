from shardwise_deepspeed.optimizers import DeepSpeedCPUAdam as DeepSpeedCPUAdam

__all__ = ["DeepSpeedCPUAdam"]
