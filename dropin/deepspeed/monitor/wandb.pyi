from shardwise_deepspeed.monitors import WandbMonitor as WandbMonitor

__all__ = ["WandbMonitor"]
