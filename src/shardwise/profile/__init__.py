"""What a model computes and how long it takes: floating-point operations by module, times of a step's parts, rates."""

from shardwise.profile.profiler import FlopsProfiler, get_model_profile
from shardwise.profile.tree import ModuleProfile

__all__ = ["FlopsProfiler", "ModuleProfile", "get_model_profile"]
