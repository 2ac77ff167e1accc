"""Optimizers: classes of this library, a registry of names, and the sharding that each class allows."""

from shardwise.optim.adagrad import Adagrad
from shardwise.optim.adam import Adam, AdamW
from shardwise.optim.elementwise import ElementwiseOptimizer
from shardwise.optim.lamb import Lamb
from shardwise.optim.layerwise import Layerwise
from shardwise.optim.lion import Lion
from shardwise.optim.muon import Muon
from shardwise.optim.onebit import OnebitAdam, OnebitLamb, ZeroOneAdam
from shardwise.optim.registry import build, names
from shardwise.optim.sharding import Sharding, group_shardings, sharding_of
from shardwise.optim.states import is_elementwise_state

__all__ = [
    "Adagrad",
    "Adam",
    "AdamW",
    "ElementwiseOptimizer",
    "Lamb",
    "Layerwise",
    "Lion",
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
