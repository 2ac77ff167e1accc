"""Named profiler ranges: labels of time between a model's own operators.

torch's profiler, NVTX under `emit_nvtx`, and listeners of this process show a range under the same name. Because each
unit of each pass has several, ranges exist only while a profiler or a listener is active.
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
    """Receives the ranges named in `ranges` (None: all). Ranges without a receiver are not created."""

    ranges: frozenset[str] | None

    def around(self, what: str, unit: str, size: int) -> AbstractContextManager[Any]:
        """Return a context manager around a range, which neither raises nor hides errors; arguments as in `named`."""

    def flight(self, what: str, unit: str, size: int) -> Callable[[], None]:
        """Record the launch of an asynchronous operation; return the callback for its end."""


_listeners: tuple[Listener, ...] = ()
_changing = threading.Lock()


def named(what: str, unit: str = "", size: int = 0) -> AbstractContextManager[Any]:
    """Return a profiler range; a null context if no profiler or listener is active. `size`: bytes, if not the unit's.

    Names: "forward", "backward", "step", "boundary"; "gather", "wait for gather", "reduce", "wait for reduction";
    "acquire", "wait for tensors", "store", "wait for store", "copy"; "action", "message" of pipelines.

    >>> with torch.profiler.profile() as profile, named("gather", "layers.0"):
    ...     pass
    >>> profile.events()[0].name
    'shardwise::gather layers.0'
    >>> named("gather", "layers.0")
    <contextlib.nullcontext object at ...>
    """
    if not _listeners and not profiler_active():
        return _NOTHING
    contexts = [each.around(what, unit, size) for each in _listeners if each.ranges is None or what in each.ranges]
    if profiler_active():
        contexts.insert(0, torch.profiler.record_function(f"shardwise::{what} {unit}".rstrip()))
    return _nested(contexts) if contexts else _NOTHING


@contextlib.contextmanager
def _nested(contexts: list[AbstractContextManager[Any]]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def watched() -> bool:
    """Return True if a listener or torch's profiler is active."""
    return bool(_listeners) or profiler_active()


def _landed() -> None:
    pass


def launched(what: str, unit: str = "", size: int = 0) -> Callable[[], None]:
    """Report an asynchronous "bring" or "take" to listeners; return the callback for its end, for any thread.

    Because the ranges of profilers belong to threads, profilers do not show it.
    """
    ends = [listener.flight(what, unit, size) for listener in _listeners]

    def landed() -> None:
        for end in ends:
            end()

    return landed


class Stretches:
    """Consecutive ranges, one a unit, each ending where the next begins.

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
        """End the current range and begin the range of a unit."""
        self.end()
        self._range, self.unit = named(self._what, unit), unit
        self._range.__enter__()

    def end(self) -> None:
        """End the current range, if any."""
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = self.unit = None


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Register a listener inside the block, on all threads; blocks may be nested and may end in any order."""
    global _listeners
    with _changing:
        _listeners = (*_listeners, listener)
    try:
        yield
    finally:
        with _changing:
            _listeners = tuple(other for other in _listeners if other is not listener)
