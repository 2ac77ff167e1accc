"""Ends the engines that a test has left on its ranks, so that tests need not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwise.engine import Engine

_living: list[Engine] = []
_destroy = Engine.destroy


class _Destroy:
    """`Engine.destroy`, which takes the engine off the list as it is looked up.

    Without a frame of its own: messages name the line of the test that calls it.
    """

    def __get__(self, engine: Engine | None, owner: type) -> Callable[..., None]:
        if engine is None:
            return _destroy
        _living[:] = [one for one in _living if one is not engine]
        return _destroy.__get__(engine, owner)


def watch_engines() -> None:
    """Keep the engines that are made in this process from now on, until they are destroyed."""

    def new(cls: type[Engine], **_: Any) -> Engine:
        engine = object.__new__(cls)
        _living.append(engine)
        return engine

    Engine.__new__ = new  # type: ignore[method-assign,assignment]
    Engine.destroy = _Destroy()  # type: ignore[method-assign,assignment]


def end_engines() -> None:
    """Destroy the engines that are left, in the order in which they were made, which is that of all ranks."""
    while _living:
        _living[0].destroy()


def forget_engines() -> None:
    """Drop the engines of a call that has failed."""
    _living.clear()
