"""Parallelism within a model: sequences that several ranks share."""

from shardwise.parallel.attention import DistributedAttention
from shardwise.parallel.data import RoundRobinLoader, SequenceLoader, split
from shardwise.parallel.huggingface import share_attention
from shardwise.parallel.loss import mean_loss, token_loss
from shardwise.parallel.ring import RingAttention
from shardwise.parallel.sequence import SequenceGroup, begin, current, end
from shardwise.parallel.tiled import TiledMLP, sequence_tiled_compute, tiled_loss

__all__ = [
    "DistributedAttention",
    "RingAttention",
    "RoundRobinLoader",
    "SequenceGroup",
    "SequenceLoader",
    "TiledMLP",
    "begin",
    "current",
    "end",
    "mean_loss",
    "sequence_tiled_compute",
    "share_attention",
    "split",
    "tiled_loss",
    "token_loss",
]
