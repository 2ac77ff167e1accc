"""Logical tensors: names of a model's parameters, and the location of each of their elements.

Because a sharded run has no whole tensors, code that refers to a parameter by name (checkpoints, export, debug access,
planning) uses the registry. Nothing is attached to the user's tensors; the registry finds a parameter by identity.
"""

from shardwise.registry.narrowing import Keeper, keep_elsewhere, narrow
from shardwise.registry.parts import Part, copy_part, declare_as, declare_part, declare_stack, part_of, without_part
from shardwise.registry.tensors import (
    DomainKey,
    HeldPart,
    LogicalTensor,
    Registry,
    cut,
    paste,
    taken,
    takes_compute_dtype,
)

__all__ = [
    "DomainKey",
    "HeldPart",
    "Keeper",
    "LogicalTensor",
    "Part",
    "Registry",
    "copy_part",
    "cut",
    "declare_as",
    "declare_part",
    "declare_stack",
    "keep_elsewhere",
    "narrow",
    "part_of",
    "paste",
    "taken",
    "takes_compute_dtype",
    "without_part",
]
