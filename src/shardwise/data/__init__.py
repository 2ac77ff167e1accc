"""Feeding batches: each rank its share, in an order that a checkpoint can continue exactly."""

from shardwise.data.loader import EngineDataLoader
from shardwise.data.repeat import RepeatingLoader
from shardwise.data.sampler import ResumableDistributedSampler

__all__ = ["EngineDataLoader", "RepeatingLoader", "ResumableDistributedSampler"]
