from shardwise_deepspeed.monitors import csvMonitor as csvMonitor

__all__ = ["csvMonitor"]
