"""Attributes of an engine that are delegated to its parts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast

Value = TypeVar("Value")
Arguments = ParamSpec("Arguments")


def of_part(
    part: str, method: Callable[Concatenate[Any, Arguments], Value]
) -> Callable[Concatenate[Any, Arguments], Value]:
    """Return an engine method that calls a part's method, with its signature and documentation."""

    @functools.wraps(method)
    def call(engine: Any, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Value:
        return method(getattr(engine, part), *args, **kwargs)

    # Because tracebacks and reports of stalls name the method that a script has called by its frame.
    function: Any = call
    function.__code__ = function.__code__.replace(co_name=method.__name__)
    return call


class Held(Generic[Value]):
    """Attribute delegated to a part's attribute of the same name; scripts may set it."""

    def __init__(self, part: str) -> None:
        self._part = part

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, engine: Any, owner: type | None = None) -> Value:
        return cast(Value, self if engine is None else getattr(getattr(engine, self._part), self._name))

    def __set__(self, engine: Any, value: Value) -> None:
        setattr(getattr(engine, self._part), self._name, value)


class OfOptimizer:
    """Attribute delegated to the optimizer, unless the module has one; no setter, because a script may set its own."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, engine: Any, owner: type | None = None) -> Any:
        if engine is None:
            return self
        holder = engine.module if hasattr(engine.module, self._name) else engine.optimizer
        return getattr(holder, self._name)  # an AttributeError falls back to `Engine.__getattr__`
