from shardwise_deepspeed.monitors import TensorBoardMonitor as TensorBoardMonitor

__all__ = ["TensorBoardMonitor"]
