from shardwise.config.schema.observe import CSVMonitor as CSVConfig
from shardwise.config.schema.observe import Comet as CometConfig
from shardwise_deepspeed.monitors import DeepSpeedMonitorConfig as DeepSpeedMonitorConfig
from shardwise.config.schema.observe import TensorBoard as TensorBoardConfig
from shardwise.config.schema.observe import WandB as WandbConfig
from shardwise_deepspeed.monitors import get_monitor_config as get_monitor_config

__all__ = ["CSVConfig", "CometConfig", "DeepSpeedMonitorConfig", "TensorBoardConfig", "WandbConfig", "get_monitor_config"]
