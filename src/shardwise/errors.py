"""Exceptions of shardwise. A class stands for a kind of failure that a caller can handle.

Every message names the thing (key, file, rank, parameter, unit), the expected and the found value, and the fix. Classes
also derive from the builtin that Python code conventionally catches (`ValueError` for wrong input and so on).
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


class ElasticBatchError(BatchSizeError):
    """No batch size can be chosen from the section `elasticity`."""


class ElasticConfigError(ElasticBatchError):
    """The section `elasticity` is incomplete, or contradicts another key or the scheduler's."""


class ElasticWorldSizeError(ElasticBatchError):
    """The number of ranks cannot keep the elastic batch size."""


class ConflictError(ConfigError, AssertionError):
    """Two valid configuration keys contradict each other."""


class CheckpointError(ShardwiseError, RuntimeError):
    """A checkpoint is missing, incomplete, damaged, or belongs to another model.

    Attributes:
        report: a `shardwise.checkpoint.LoadReport` if names or shapes did not fit; else None.
    """

    report: Any = None


class CheckpointPathError(CheckpointError, ValueError):
    """A checkpoint directory or tag cannot be used."""


class NonFiniteStateError(CheckpointError):
    """The training state has values that are infinite or NaN, and was not copied."""


class OffloadError(ShardwiseError, RuntimeError):
    """State cannot be written to a disk, or cannot be read back unchanged.

    After an error in a pass or in a step the engine refuses to continue: its state is that of no step.
    """


class LaunchError(ShardwiseError, RuntimeError):
    """The launcher cannot start or has lost its processes."""


class CommandLineError(LaunchError, ValueError):
    """A command-line option is missing, has a wrong value, or contradicts another one."""


class ReportError(ShardwiseError, RuntimeError):
    """A run has no data to draw, or plotly is not installed."""


class ReleasedParameterError(ShardwiseError, RuntimeError):
    """The values of a resharded parameter were accessed."""


class UsageError(ShardwiseError, RuntimeError):
    """The engine's methods were called in a wrong order or place."""


class NoSuchModuleError(UsageError, ValueError):
    """A model has none of the named modules."""


class NotScalarError(UsageError, AssertionError):
    """A loss is not one number."""


class DesyncError(ShardwiseError, RuntimeError):
    """Ranks disagree on which collective comes next."""


class PeerLostError(ShardwiseError, RuntimeError):
    """A rank that exchanges data with this one has ended, or does not answer.

    Attributes:
        peer: the rank that did not answer: its number in the group, and in errors of an engine its global number.
        timed_out: True if the timeout of a collective has expired, False if a connection has ended.
    """

    peer: int = -1
    timed_out: bool = False


class PipelineError(UsageError):
    """A pipeline cannot be built from the layers, or its batch cannot be run."""


class SyncError(UsageError, AssertionError):
    """Gradients would be stepped without having been reduced."""


class AnomalyError(ShardwiseError, ArithmeticError):
    """A step is anomalous, and the configuration requests a stop, or a rollback that is impossible."""


class NonFiniteError(AnomalyError):
    """A gradient is infinite or NaN, and the configuration requests a stop."""


class TimelineError(ShardwiseError, ValueError):
    """A directory has no timelines, or a file is none."""


class LossScaleError(ShardwiseError, ArithmeticError):
    """Gradients overflow although the loss scale is at its minimum."""


class AbsentNameError(ShardwiseError, NotImplementedError):
    """A DeepSpeed name was used for a feature that this version lacks.

    Because no class can be an ImportError (`from a import b`) and an AttributeError (`hasattr(a, "b")`), an import or
    an attribute access raises one of the two subclasses.
    """


class AbsentAttributeError(AbsentNameError, AttributeError):
    """Such a name was read as an attribute; for `hasattr` and `getattr` with a default it does not exist."""


class AbsentImportError(AbsentNameError, ModuleNotFoundError):
    """Such a name was imported."""
