"""Data loading: per-rank shares of a dataset, in an order that a checkpoint can resume exactly."""

from shardwise.data.analysis import DataAnalyzer, DistributedDataAnalyzer
from shardwise.data.curriculum import CurriculumSampler
from shardwise.data.fetch import outlive_signals
from shardwise.data.indexed import MMapIndexedDataset, MMapIndexedDatasetBuilder
from shardwise.data.layer_drop import ProgressiveLayerDrop
from shardwise.data.loader import EngineDataLoader
from shardwise.data.repeat import RepeatingLoader
from shardwise.data.sampler import ResumableDistributedSampler
from shardwise.data.token_batches import TokenBatches
from shardwise.data.token_drop import (
    RandomLayerTokenDrop,
    RandomLTDScheduler,
    convert_to_random_ltd,
    remove_random_ltd_state_dict,
    save_without_random_ltd,
)

__all__ = [
    "CurriculumSampler",
    "DataAnalyzer",
    "DistributedDataAnalyzer",
    "EngineDataLoader",
    "MMapIndexedDataset",
    "MMapIndexedDatasetBuilder",
    "ProgressiveLayerDrop",
    "RandomLTDScheduler",
    "RandomLayerTokenDrop",
    "RepeatingLoader",
    "ResumableDistributedSampler",
    "TokenBatches",
    "convert_to_random_ltd",
    "outlive_signals",
    "remove_random_ltd_state_dict",
    "save_without_random_ltd",
]
