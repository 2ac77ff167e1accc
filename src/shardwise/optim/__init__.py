"""Optimizers: building them by name, our own, and knowing which of them can run on a part of a parameter."""

from shardwise.optim.lamb import Lamb
from shardwise.optim.layerwise import Layerwise
from shardwise.optim.muon import Muon
from shardwise.optim.onebit import OnebitAdam, OnebitLamb, ZeroOneAdam
from shardwise.optim.registry import build, names
from shardwise.optim.sharding import Sharding, group_shardings, sharding_of
from shardwise.optim.states import is_elementwise_state

__all__ = [
    "Lamb",
    "Layerwise",
    "Muon",
    "OnebitAdam",
    "OnebitLamb",
    "Sharding",
    "ZeroOneAdam",
    "build",
    "group_shardings",
    "is_elementwise_state",
    "names",
    "sharding_of",
]
