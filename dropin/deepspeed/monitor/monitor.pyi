from shardwise_deepspeed.monitors import CometMonitor as CometMonitor
from shardwise_deepspeed.monitors import Monitor as Monitor
from shardwise_deepspeed.monitors import MonitorMaster as MonitorMaster
from shardwise_deepspeed.monitors import TensorBoardMonitor as TensorBoardMonitor
from shardwise_deepspeed.monitors import WandbMonitor as WandbMonitor
from shardwise_deepspeed.monitors import csvMonitor as csvMonitor

__all__ = ["CometMonitor", "Monitor", "MonitorMaster", "TensorBoardMonitor", "WandbMonitor", "csvMonitor"]
