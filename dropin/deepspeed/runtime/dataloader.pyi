from shardwise.data import EngineDataLoader as DeepSpeedDataLoader
from shardwise.data import RepeatingLoader as RepeatingLoader

__all__ = ["DeepSpeedDataLoader", "RepeatingLoader"]
