"""Hooks that stay behind when the module that has them is copied, pickled or compiled."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from shardwise.compat import never_compiled


def _nothing(*_: Any, **__: Any) -> None:
    """Stand in a copied module for a hook of the engine that the original belongs to."""


def _in_a_copy() -> Callable[..., None]:
    return _nothing


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a bound method as long as its object is alive, which the function does not keep."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> Any:
        alive = reference()
        return None if alive is None else alive(*args, **kwargs)

    return call


class ModuleHook:
    """A hook for one module: calls `function` outside of compiled regions, and does nothing in a copy of the module.

    `copy.deepcopy`, `pickle` and `torch.save` copy a module's hooks with it; those of an engine would then take the
    copy for a part of the engine's model, and local functions cannot be pickled at all.
    """

    __slots__ = ("function",)

    may_wait_for_ranks = True
    """Whoever wants to know something of the module on one rank alone must run a copy of it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    @never_compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self.function(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        """Become nothing."""
        return _in_a_copy, ()
