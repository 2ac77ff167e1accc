"""Data loading: per-rank shares of a dataset, in an order that a checkpoint can resume exactly."""

from shardwise.data.fetch import outlive_signals
from shardwise.data.loader import EngineDataLoader
from shardwise.data.repeat import RepeatingLoader
from shardwise.data.sampler import ResumableDistributedSampler

__all__ = ["EngineDataLoader", "RepeatingLoader", "ResumableDistributedSampler", "outlive_signals"]
