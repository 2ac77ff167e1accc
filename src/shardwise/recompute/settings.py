"""What checkpointed calls do besides: move their inputs, synchronize, tell times.

The script says it (`configure`), or the configuration of the engine in whose forward pass they are made. An option is
on if either says so.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardwise.errors import UsageError
from shardwise.offload.activations import ActivationOffload
from shardwise.parallel import current_tensors

if TYPE_CHECKING:
    from shardwise.config.schema.parallel import ActivationCheckpointing
    from shardwise.parallel.tensor.group import TensorGroup


@dataclass(frozen=True)
class Settings:
    """Options, named as those of `configure`.

    Attributes:
        checkpoint_in_cpu: inputs are kept on the host.
        contiguous_checkpointing: memory of the host for them is kept from pass to pass.
        synchronize: the host waits for the device before and after each call.
        profile: calls are timed.
        partition_activations: inputs are divided over the ranks that have a copy of the model among them.
    """

    checkpoint_in_cpu: bool = False
    contiguous_checkpointing: bool = False
    synchronize: bool = False
    profile: bool = False
    partition_activations: bool = False

    @classmethod
    def of(cls, section: ActivationCheckpointing) -> Settings:
        """Return what a section of a configuration says."""
        return cls(
            section.cpu_checkpointing,
            section.contiguous_memory_optimization,
            section.synchronize_checkpoint_boundary,
            section.profile,
            section.partition_activations,
        )

    def __or__(self, other: Settings) -> Settings:
        return Settings(
            self.checkpoint_in_cpu or other.checkpoint_in_cpu,
            self.contiguous_checkpointing or other.contiguous_checkpointing,
            self.synchronize or other.synchronize,
            self.profile or other.profile,
            self.partition_activations or other.partition_activations,
        )

    def __bool__(self) -> bool:
        return self != NOTHING


NOTHING = Settings()

_script = NOTHING
_unit: list[Any] = [None]
_own: ActivationOffload | None = None
"""Moves inputs of calls outside of an engine's forward pass."""


class _Scope(threading.local):
    """What an engine's forward pass says on this thread."""

    settings = NOTHING
    offload: ActivationOffload | None = None
    group: TensorGroup | None = None


_scope = _Scope()


def of_script() -> Settings:
    """Return what the script has said."""
    return _script


def set_script(settings: Settings, unit: Any = None) -> None:
    """Take what the script says, and its model-parallel unit."""
    global _script
    _script = settings
    _unit[0] = unit


def unit_of_script() -> Any:
    """Return the script's model-parallel unit, or None."""
    return _unit[0]


def in_force() -> Settings:
    """Return what holds for a call that is made now."""
    return _script | _scope.settings


def mover() -> ActivationOffload:
    """Return what moves the inputs of a call that is made now."""
    global _own
    if _scope.offload is not None:
        return _scope.offload
    if _own is None:
        _own = ActivationOffload()
    return _own


def sharing() -> TensorGroup | None:
    """Return the ranks that have a copy of the model among them, for a call that is made now; None: there is one.

    Raises:
        UsageError: the script's unit has several ranks, and there is no engine or group that connects them.
    """
    group = _scope.group or current_tensors()
    if group is None and model_parallel_size(_unit[0]) > 1:
        raise UsageError(
            "partition_activations: checkpoint() was called outside of an engine, and nothing connects the "
            "model-parallel ranks of configure(mpu_). Call the engine, or shardwise.parallel.begin_tensors(size) before"
        )
    return group


def model_parallel_size(unit: Any) -> int:
    """Return how many ranks have a copy of the model among them, by a model-parallel unit or None."""
    names = ("get_tensor_model_parallel_world_size", "get_model_parallel_world_size")
    return next((int(getattr(unit, name)()) for name in names if hasattr(unit, name)), 1)


def let_go() -> None:
    """Give back memory of the host that is kept for further calls outside of engines."""
    if _own is not None:
        _own.close()


@contextmanager
def following(settings: Settings, offload: ActivationOffload, group: TensorGroup | None = None) -> Iterator[None]:
    """Have calls inside of the block follow an engine.

    Args:
        settings: of its configuration.
        offload: moves the inputs.
        group: the ranks that have a copy of the model among them.
    """
    before = _scope.settings, _scope.offload, _scope.group
    _scope.settings, _scope.offload, _scope.group = settings, offload, group
    try:
        yield
    finally:
        _scope.settings, _scope.offload, _scope.group = before
