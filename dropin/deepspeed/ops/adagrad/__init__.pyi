from deepspeed.ops.adagrad import cpu_adagrad as cpu_adagrad
from shardwise_deepspeed.optimizers import DeepSpeedCPUAdagrad as DeepSpeedCPUAdagrad

__all__ = ["DeepSpeedCPUAdagrad", "cpu_adagrad"]
