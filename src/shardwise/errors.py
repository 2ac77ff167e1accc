"""Exceptions of shardwise.

Every message names the thing (key, file, rank, parameter, unit), what was expected and found, and the fix.
The classes exist so that a caller can react to a kind of failure; they also derive from the builtin that
Python code conventionally catches (`ValueError` for wrong input and so on).
"""

from __future__ import annotations

from typing import Any


class ShardwiseError(Exception):
    """Base of every error that shardwise raises on purpose."""


class ConfigError(ShardwiseError, ValueError):
    """A configuration key is unknown, has a wrong value, or contradicts another one.

    Attributes:
        problems: every mistake that the message lists, each with `path` and `message`.
    """

    problems: tuple[Any, ...] = ()


class NotBuiltError(ConfigError, NotImplementedError):
    """A known configuration key asks for a feature that this version does not have."""


class BatchSizeError(ConfigError, AssertionError):
    """The three batch sizes contradict each other or the number of ranks."""


class ConflictError(ConfigError, AssertionError):
    """Two valid configuration keys contradict each other."""


class CheckpointError(ShardwiseError, RuntimeError):
    """A checkpoint is missing, incomplete, damaged, or belongs to another model.

    Attributes:
        report: if names or shapes did not fit: which (a `shardwise.checkpoint.LoadReport`); None otherwise.
    """

    report: Any = None


class CheckpointPathError(CheckpointError, ValueError):
    """A checkpoint directory or tag is not one that can be used."""


class NonFiniteStateError(CheckpointError):
    """The training state has values that are infinite or NaN, and was not copied."""


class OffloadError(ShardwiseError, RuntimeError):
    """State cannot be written to a disk, or not be read back as it was written.

    After an error in a pass or in a step the engine refuses to go on: its state is that of no step.
    """


class LaunchError(ShardwiseError, RuntimeError):
    """The launcher cannot start or has lost its processes."""


class CommandLineError(LaunchError, ValueError):
    """A command-line option is missing, has a wrong value, or contradicts another one."""


class ReportError(ShardwiseError, RuntimeError):
    """A run cannot be drawn: nothing of it is there, or what draws it is not installed."""


class ReleasedParameterError(ShardwiseError, RuntimeError):
    """The values of a resharded parameter were accessed."""


class UsageError(ShardwiseError, RuntimeError):
    """The engine's methods were called in a wrong order or place."""


class NoSuchModuleError(UsageError, ValueError):
    """A model has none of the modules that were named."""


class NotScalarError(UsageError, AssertionError):
    """A loss is not one number."""


class DesyncError(ShardwiseError, RuntimeError):
    """Ranks disagree on which collective comes next."""


class PeerLostError(ShardwiseError, RuntimeError):
    """A rank that this one exchanges data with has gone, or does not answer.

    Attributes:
        peer: the rank that did not answer: its number in the group, and in errors of an engine its global number.
        timed_out: whether the limit for a collective has run out, as opposed to a connection that has ended.
    """

    peer: int = -1
    timed_out: bool = False


class SyncError(UsageError, AssertionError):
    """Gradients would be stepped without having been reduced."""


class AnomalyError(ShardwiseError, ArithmeticError):
    """A step is not what it should be, and the configuration asks to stop then, or to go back to where it cannot."""


class NonFiniteError(AnomalyError):
    """A gradient is infinite or not a number, and the configuration asks to stop then."""


class TimelineError(ShardwiseError, ValueError):
    """A directory has no timelines, or a file is none."""


class LossScaleError(ShardwiseError, ArithmeticError):
    """Gradients overflow although the loss scale is as small as it may be."""


class AbsentNameError(ShardwiseError, NotImplementedError):
    """A name of DeepSpeed's whose feature this version does not have was used.

    Where it is imported or read, one of the two subclasses is raised: Python does not let one class be both an
    ImportError and an AttributeError, `from a import b` needs the former, and `hasattr(a, "b")` is false only for the
    latter.
    """


class AbsentAttributeError(AbsentNameError, AttributeError):
    """Such a name was read as an attribute; to `hasattr` and `getattr` with a default it is not there."""


class AbsentImportError(AbsentNameError, ModuleNotFoundError):
    """Such a name was imported."""
