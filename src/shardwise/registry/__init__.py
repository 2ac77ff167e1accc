"""Logical tensors: what the model's parameters are called and where each of their elements lives.

A sharded run has no whole tensors, so anything that talks about "the parameter `h.3.mlp.weight`" (checkpoints, export,
debug access, planning) asks the registry. Nothing is attached to the user's tensors; a parameter is found by identity.
"""

from shardwise.registry.narrowing import Keeper, keep_elsewhere, narrow
from shardwise.registry.parts import Part, copy_part, declare_part, part_of, set_aside
from shardwise.registry.tensors import DomainKey, HeldPart, LogicalTensor, Registry, cut, paste, taken

__all__ = [
    "DomainKey",
    "HeldPart",
    "Keeper",
    "LogicalTensor",
    "Part",
    "Registry",
    "copy_part",
    "cut",
    "declare_part",
    "keep_elsewhere",
    "narrow",
    "part_of",
    "paste",
    "set_aside",
    "taken",
]
