from shardwise_deepspeed.optimizers import DeepSpeedCPUAdagrad as DeepSpeedCPUAdagrad

__all__ = ["DeepSpeedCPUAdagrad"]
