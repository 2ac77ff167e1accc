"""Named ranges: what profilers and timelines say about the time between a model's own operators.

A range is shown by torch's profiler, by NVTX under `emit_nvtx`, and to listeners of this process, by the same name. It
is made only while somebody looks: there are several for each unit of each pass.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from shardwise.compat import profiler_active

_NOTHING = contextlib.nullcontext()


class Listener(Protocol):
    """Is told of ranges.

    Attributes:
        ranges: what it is told of; None: of all. Ranges are many, and what nobody wants is not made.
    """

    ranges: frozenset[str] | None

    def around(self, what: str, unit: str, size: int) -> AbstractContextManager[Any]:
        """Return what is around a range, which neither raises nor hides errors; arguments as in `named`."""

    def flight(self, what: str, unit: str, size: int) -> Callable[[], None]:
        """Something has been launched; return what is to be called at its end."""


_listeners: tuple[Listener, ...] = ()
_changing = threading.Lock()


def named(what: str, unit: str = "", size: int = 0) -> AbstractContextManager[Any]:
    """Return a context that profilers and listeners show by this name; where nobody looks it does nothing.

    Args:
        what: "forward", "backward", "step", "boundary"; "gather", "wait for gather", "reduce", "wait for reduction";
            "lend", "wait for loan", "store", "wait for store", "copy".
        unit: whose parameters or gradients they are.
        size: bytes, where they are not those of the unit.

    Example:
        >>> with torch.profiler.profile() as profile, named("gather", "layers.0"):
        ...     pass
        >>> profile.events()[0].name
        'shardwise::gather layers.0'
        >>> named("gather", "layers.0")
        <contextlib.nullcontext object at ...>
    """
    if profiler_active():
        shown = torch.profiler.record_function(f"shardwise::{what} {unit}".rstrip())
        return _together([shown, *_heard(what, unit, size)])
    return _together(_heard(what, unit, size)) if _listeners else _NOTHING


def _heard(what: str, unit: str, size: int) -> list[AbstractContextManager[Any]]:
    """Return what listeners have around a range."""
    wanted = [listener for listener in _listeners if listener.ranges is None or what in listener.ranges]
    return [listener.around(what, unit, size) for listener in wanted]


def _together(contexts: list[AbstractContextManager[Any]]) -> AbstractContextManager[Any]:
    if not contexts:
        return _NOTHING
    return contexts[0] if len(contexts) == 1 else _Nested(contexts)


class _Nested:
    """Contexts in one another, the first around the others."""

    __slots__ = ("_contexts",)

    def __init__(self, contexts: list[AbstractContextManager[Any]]) -> None:
        self._contexts = contexts

    def __enter__(self) -> None:
        for context in self._contexts:
            context.__enter__()

    def __exit__(self, *error: Any) -> None:
        for context in reversed(self._contexts):
            context.__exit__(*error)


def watched() -> bool:
    """Whether somebody looks: a listener, or torch's profiler."""
    return bool(_listeners) or profiler_active()


def _landed() -> None:
    """Nobody has been told of the launch."""


def launched(what: str, unit: str = "", size: int = 0) -> Callable[[], None]:
    """Tell listeners that something is on its way; what is returned is to be called at its end, on any thread.

    Profilers do not show it: their ranges belong to threads.

    Args:
        what: "bring" or "take".
        unit: whose values.
        size: bytes.
    """
    if not _listeners:
        return _landed
    ends = [listener.flight(what, unit, size) for listener in _listeners]

    def landed() -> None:
        for end in ends:
            end()

    return landed


class Stretches:
    """Ranges of which each begins where the one before ends, made while somebody looks.

    Example:
        >>> stretches = Stretches("backward")
        >>> with torch.profiler.profile() as profile:
        ...     for unit in ("layers.1", "layers.0"):
        ...         stretches.begin(unit)
        ...     stretches.end()
        >>> [event.name for event in profile.events()]
        ['shardwise::backward layers.1', 'shardwise::backward layers.0']
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._range: AbstractContextManager[Any] | None = None
        self.unit: str | None = None

    def begin(self, unit: str) -> None:
        """Begin the stretch of a unit."""
        self.end()
        self._range, self.unit = named(self._what, unit), unit
        self._range.__enter__()

    def end(self) -> None:
        """End the last one; nothing happens where there is none."""
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = self.unit = None


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Have somebody told of the ranges inside of the block, on all threads: a device's backward pass has its own.

    Blocks may lie in one another, and may end in any order.
    """
    global _listeners
    with _changing:
        _listeners = (*_listeners, listener)
    try:
        yield
    finally:
        with _changing:
            _listeners = tuple(other for other in _listeners if other is not listener)
