"""Accounting of every byte that an engine holds, measuring what modules make of it, and planning both."""

from shardwise.memory.accountant import Accountant, Category
from shardwise.memory.dryrun import ActivationPlan, Stretch, plan_activations
from shardwise.memory.optimizer import StepBytes, step_bytes
from shardwise.memory.process import give_back_freed_memory, module_bytes, peak_resident_bytes, resident_bytes
from shardwise.memory.report import MemoryReport, MemoryRow
from shardwise.memory.track import track_activations
from shardwise.memory.usage import memory_status, see_memory_usage

__all__ = [
    "Accountant",
    "ActivationPlan",
    "Category",
    "MemoryReport",
    "MemoryRow",
    "StepBytes",
    "Stretch",
    "give_back_freed_memory",
    "memory_status",
    "module_bytes",
    "peak_resident_bytes",
    "plan_activations",
    "resident_bytes",
    "see_memory_usage",
    "step_bytes",
    "track_activations",
]
