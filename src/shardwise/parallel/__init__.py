"""Sequence parallelism and tensor parallelism within a model."""

from shardwise.parallel.attention import DistributedAttention
from shardwise.parallel.data import RoundRobinLoader, SequenceLoader, split
from shardwise.parallel.huggingface import share_attention
from shardwise.parallel.loss import mean_loss, token_loss
from shardwise.parallel.ring import RingAttention
from shardwise.parallel.sequence import SequenceGroup, begin, current, end
from shardwise.parallel.tensor.entry import begin_tensors, current_tensors, end_tensors, tp_model_init
from shardwise.parallel.tiled import TiledMLP, sequence_tiled_compute, tiled_loss

__all__ = [
    "DistributedAttention",
    "RingAttention",
    "RoundRobinLoader",
    "SequenceGroup",
    "SequenceLoader",
    "TiledMLP",
    "begin",
    "begin_tensors",
    "current",
    "current_tensors",
    "end",
    "end_tensors",
    "mean_loss",
    "sequence_tiled_compute",
    "share_attention",
    "split",
    "tiled_loss",
    "token_loss",
    "tp_model_init",
]
