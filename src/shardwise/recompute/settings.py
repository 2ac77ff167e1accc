"""Options of checkpointed calls: offload of inputs, synchronization, timing, partitioning, kept outputs.

An option is on if the script (`configure`) or the configuration of the engine in its forward pass enables it.
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
from shardwise.recompute.selective import Selective

if TYPE_CHECKING:
    from shardwise.config.schema.parallel import ActivationCheckpointing
    from shardwise.parallel.tensor.group import TensorGroup


@dataclass(frozen=True)
class Settings:
    """Options, named as the arguments of `configure`; `selective` is a key of the configuration only."""

    checkpoint_in_cpu: bool = False
    contiguous_checkpointing: bool = False
    synchronize: bool = False
    profile: bool = False
    partition_activations: bool = False
    selective: Selective | None = None

    @classmethod
    def of(cls, section: ActivationCheckpointing) -> Settings:
        """Return the options of a configuration section."""
        return cls(
            section.cpu_checkpointing,
            section.contiguous_memory_optimization,
            section.synchronize_checkpoint_boundary,
            section.profile,
            section.partition_activations,
            section.selective,
        )

    def __or__(self, other: Settings) -> Settings:
        return Settings(
            self.checkpoint_in_cpu or other.checkpoint_in_cpu,
            self.contiguous_checkpointing or other.contiguous_checkpointing,
            self.synchronize or other.synchronize,
            self.profile or other.profile,
            self.partition_activations or other.partition_activations,
            self.selective or other.selective,
        )

    def __bool__(self) -> bool:
        return self != NOTHING


NOTHING = Settings()

_script = NOTHING
_unit: list[Any] = [None]
_own: ActivationOffload | None = None  # activation offload of calls outside of an engine's forward pass


class _Scope(threading.local):
    settings = NOTHING
    calls = 0
    offload: ActivationOffload | None = None
    group: TensorGroup | None = None


_scope = _Scope()


def of_script() -> Settings:
    """Return the script's options."""
    return _script


def set_script(settings: Settings, unit: Any = None) -> None:
    """Set the script's options and model-parallel unit."""
    global _script
    _script = settings
    _unit[0] = unit


def unit_of_script() -> Any:
    """Return the script's model-parallel unit, or None."""
    return _unit[0]


def in_force() -> Settings:
    """Return the options of a call made now."""
    return _script | _scope.settings


def count_call() -> None:
    """Count a call with options."""
    _scope.calls += 1


def calls() -> int:
    """Return the number of calls with options on this thread."""
    return _scope.calls


def mover() -> ActivationOffload:
    """Return the activation offload of a call made now."""
    global _own
    if _scope.offload is not None:
        return _scope.offload
    if _own is None:
        _own = ActivationOffload()
    return _own


def sharing() -> TensorGroup | None:
    """Return the tensor-parallel group of a call made now; raises a UsageError if nothing connects the unit's ranks."""
    group = _scope.group or current_tensors()
    if group is None and model_parallel_size(_unit[0]) > 1:
        raise UsageError(
            "partition_activations: checkpoint() was called outside of an engine, and nothing connects the "
            "model-parallel ranks of configure(mpu_). Call the engine, or shardwise.parallel.begin_tensors(size) before"
        )
    return group


def model_parallel_size(unit: Any) -> int:
    """Return the tensor-parallel size of a model-parallel unit; 1 for None."""
    names = ("get_tensor_model_parallel_world_size", "get_model_parallel_world_size")
    return next((int(getattr(unit, name)()) for name in names if hasattr(unit, name)), 1)


def let_go() -> None:
    """Free the host buffers kept for calls outside of engines."""
    if _own is not None:
        _own.close()


@contextmanager
def following(settings: Settings, offload: ActivationOffload, group: TensorGroup | None = None) -> Iterator[None]:
    """Apply an engine's options, activation offload and tensor-parallel group to calls inside the block."""
    before = _scope.settings, _scope.offload, _scope.group
    _scope.settings, _scope.offload, _scope.group = settings, offload, group
    try:
        yield
    finally:
        _scope.settings, _scope.offload, _scope.group = before
