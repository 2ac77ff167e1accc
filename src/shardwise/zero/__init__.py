"""ZeRO: parameters, gradients and optimizer state sharded over data-parallel ranks."""

from shardwise.zero.parameters.gathered import (
    GatheredParameters,
    register_external_parameter,
    unregister_external_parameter,
)
from shardwise.zero.parameters.init import Init
from shardwise.zero.units.presence import OffloadStateTypeEnum

__all__ = [
    "GatheredParameters",
    "Init",
    "OffloadStateTypeEnum",
    "register_external_parameter",
    "unregister_external_parameter",
]
