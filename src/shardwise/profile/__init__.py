"""Profiling: FLOPs by module, times of a step's parts, training throughput, timelines."""

from shardwise.profile.profiler import FlopsProfiler, get_model_profile
from shardwise.profile.tree import ModuleProfile

__all__ = ["FlopsProfiler", "ModuleProfile", "get_model_profile"]
