"""Optimizers: building them by name, and knowing which of them can run on a part of a parameter."""

from shardwise.optim.onebit import OnebitAdam, OnebitLamb, ZeroOneAdam
from shardwise.optim.registry import build, names
from shardwise.optim.sharding import Sharding, sharding_of
from shardwise.optim.states import is_elementwise_state

__all__ = [
    "OnebitAdam",
    "OnebitLamb",
    "Sharding",
    "ZeroOneAdam",
    "build",
    "is_elementwise_state",
    "names",
    "sharding_of",
]
