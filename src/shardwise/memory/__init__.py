"""Memory accounting of an engine, measurement of activations, and memory planning."""

from shardwise.memory.accountant import Accountant, Category, Journal, Moved, Tier
from shardwise.memory.dryrun import Call, fake_copy, fake_optimizer, like_cross_entropy, shapes_of
from shardwise.memory.limits import MemoryLimit, disk_limit, host_limits, memory_limit
from shardwise.memory.oom import OutOfMemoryError, is_out_of_memory
from shardwise.memory.process import (
    give_back_freed_memory,
    module_bytes,
    peak_resident_bytes,
    resident_bytes,
    virtual_bytes,
)
from shardwise.memory.report import MemoryReport, MemoryRow
from shardwise.memory.sources import (
    MemorySources,
    ModuleMemory,
    memory_sources,
    transformer_activation_bytes,
    transformer_model_bytes,
)
from shardwise.memory.track import track_activations
from shardwise.memory.usage import memory_status, see_memory_usage

__all__ = [
    "Accountant",
    "Call",
    "Category",
    "Journal",
    "MemoryLimit",
    "MemoryReport",
    "MemoryRow",
    "MemorySources",
    "ModuleMemory",
    "Moved",
    "OutOfMemoryError",
    "Tier",
    "disk_limit",
    "fake_copy",
    "fake_optimizer",
    "give_back_freed_memory",
    "host_limits",
    "is_out_of_memory",
    "like_cross_entropy",
    "memory_limit",
    "memory_sources",
    "memory_status",
    "module_bytes",
    "peak_resident_bytes",
    "resident_bytes",
    "see_memory_usage",
    "shapes_of",
    "track_activations",
    "transformer_activation_bytes",
    "transformer_model_bytes",
    "virtual_bytes",
]
