"""Data loading: per-rank shares of a dataset, in an order that a checkpoint can resume exactly."""

from shardwise.data.fetch import outlive_signals
from shardwise.data.layer_drop import ProgressiveLayerDrop
from shardwise.data.loader import EngineDataLoader
from shardwise.data.repeat import RepeatingLoader
from shardwise.data.sampler import ResumableDistributedSampler
from shardwise.data.token_drop import (
    RandomLayerTokenDrop,
    RandomLTDScheduler,
    convert_to_random_ltd,
    remove_random_ltd_state_dict,
    save_without_random_ltd,
)

__all__ = [
    "EngineDataLoader",
    "ProgressiveLayerDrop",
    "RandomLTDScheduler",
    "RandomLayerTokenDrop",
    "RepeatingLoader",
    "ResumableDistributedSampler",
    "convert_to_random_ltd",
    "outlive_signals",
    "remove_random_ltd_state_dict",
    "save_without_random_ltd",
]
