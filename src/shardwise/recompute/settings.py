"""What checkpointed calls do besides: move their inputs, synchronize, tell times.

The script says it (`configure`), or the configuration of the engine in whose forward pass they are made. An option is
on if either says so.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.offload.activations import ActivationOffload

if TYPE_CHECKING:
    from shardwise.config.schema.parallel import ActivationCheckpointing


@dataclass(frozen=True)
class Settings:
    """Options, named as those of `configure`.

    Attributes:
        checkpoint_in_cpu: inputs are kept on the host.
        contiguous_checkpointing: memory of the host for them is kept from pass to pass.
        synchronize: the host waits for the device before and after each call.
        profile: calls are timed.
    """

    checkpoint_in_cpu: bool = False
    contiguous_checkpointing: bool = False
    synchronize: bool = False
    profile: bool = False

    @classmethod
    def of(cls, section: ActivationCheckpointing) -> Settings:
        """Return what a section of a configuration says."""
        return cls(
            section.cpu_checkpointing,
            section.contiguous_memory_optimization,
            section.synchronize_checkpoint_boundary,
            section.profile,
        )

    def __or__(self, other: Settings) -> Settings:
        return Settings(
            self.checkpoint_in_cpu or other.checkpoint_in_cpu,
            self.contiguous_checkpointing or other.contiguous_checkpointing,
            self.synchronize or other.synchronize,
            self.profile or other.profile,
        )

    def __bool__(self) -> bool:
        return self != NOTHING


NOTHING = Settings()

_script = NOTHING
_own: ActivationOffload | None = None
"""Moves inputs of calls outside of an engine's forward pass."""


class _Scope(threading.local):
    """What an engine's forward pass says on this thread."""

    settings = NOTHING
    offload: ActivationOffload | None = None


_scope = _Scope()


def of_script() -> Settings:
    """Return what the script has said."""
    return _script


def set_script(settings: Settings) -> None:
    """Take what the script says."""
    global _script
    _script = settings


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


def let_go() -> None:
    """Give back memory of the host that is kept for further calls outside of engines."""
    if _own is not None:
        _own.close()


@contextmanager
def following(settings: Settings, offload: ActivationOffload) -> Iterator[None]:
    """Have calls inside of the block follow an engine.

    Args:
        settings: of its configuration.
        offload: moves the inputs.
    """
    before = _scope.settings, _scope.offload
    _scope.settings, _scope.offload = settings, offload
    try:
        yield
    finally:
        _scope.settings, _scope.offload = before
