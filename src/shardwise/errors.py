"""Exceptions of shardwise.

Every message names the thing (key, file, rank, parameter, unit), what was expected and found, and the fix.
The classes exist so that a caller can react to a kind of failure; they also derive from the builtin that
Python code conventionally catches (`ValueError` for wrong input and so on).
"""

from __future__ import annotations


class ShardwiseError(Exception):
    """Base of every error that shardwise raises on purpose."""


class ConfigError(ShardwiseError, ValueError):
    """A configuration key is unknown, has a wrong value, or contradicts another one."""


class NotBuiltError(ConfigError, NotImplementedError):
    """A known configuration key asks for a feature that this version does not have."""


class BatchSizeError(ConfigError, AssertionError):
    """The three batch sizes contradict each other or the number of ranks."""


class CheckpointError(ShardwiseError, RuntimeError):
    """A checkpoint is missing, incomplete, damaged, or belongs to another model."""


class LaunchError(ShardwiseError, RuntimeError):
    """The launcher cannot start or has lost its processes."""


class ReleasedParameterError(ShardwiseError, RuntimeError):
    """The values of a sharded parameter were asked for where they are not gathered."""


class UsageError(ShardwiseError, RuntimeError):
    """The engine's methods were called in an order or place that has no meaning."""


class DesyncError(ShardwiseError, RuntimeError):
    """Ranks disagree on which collective comes next."""
