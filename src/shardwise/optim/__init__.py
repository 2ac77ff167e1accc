"""Optimizers: classes of our own, building them by name, and knowing which can run on a part of a parameter."""

from shardwise.optim.adagrad import Adagrad
from shardwise.optim.adam import Adam, AdamW
from shardwise.optim.elementwise import ElementwiseOptimizer
from shardwise.optim.lion import Lion
from shardwise.optim.registry import build, names
from shardwise.optim.sharding import Sharding, sharding_of
from shardwise.optim.states import is_elementwise_state

__all__ = [
    "Adagrad",
    "Adam",
    "AdamW",
    "ElementwiseOptimizer",
    "Lion",
    "Sharding",
    "build",
    "is_elementwise_state",
    "names",
    "sharding_of",
]
