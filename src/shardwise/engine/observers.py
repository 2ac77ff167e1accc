"""Observers of an engine's passes and steps: monitors, profilers, timelines, run logs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from typing_extensions import override

from shardwise.compat import never_compiled

NOTHING: AbstractContextManager[Any] = contextlib.nullcontext()


class StepObserver:
    """Observes the passes and steps of one engine; `active` False: disabled, the engine calls no method."""

    active = True

    def forward(self, training: bool, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> AbstractContextManager[Any]:
        """Return a context for a forward pass; `training`: gradients are enabled."""
        return NOTHING

    def backward(self) -> AbstractContextManager[Any]:
        """Return a context for a backward pass."""
        return NOTHING

    def step(self) -> AbstractContextManager[Any]:
        """Return a context for a step."""
        return NOTHING

    def after_step(self) -> None:
        """Observe the end of an accumulation window."""


class Observers(StepObserver):
    """Calls the active observers in order."""

    def __init__(self, observers: Iterable[StepObserver]) -> None:
        self._observers = tuple(observer for observer in observers if observer.active)

    @never_compiled
    @override
    def forward(self, training: bool, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> AbstractContextManager[Any]:
        return _joined([observer.forward(training, args, kwargs) for observer in self._observers])

    @override
    def backward(self) -> AbstractContextManager[Any]:
        return _joined([observer.backward() for observer in self._observers])

    @override
    def step(self) -> AbstractContextManager[Any]:
        return _joined([observer.step() for observer in self._observers])

    @override
    def after_step(self) -> None:
        for observer in self._observers:
            observer.after_step()


def _joined(contexts: list[AbstractContextManager[Any]]) -> AbstractContextManager[Any]:
    contexts = [context for context in contexts if context is not NOTHING]
    if len(contexts) < 2:
        return contexts[0] if contexts else NOTHING
    return _all_of(contexts)


@contextlib.contextmanager
def _all_of(contexts: list[AbstractContextManager[Any]]) -> Any:
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield
