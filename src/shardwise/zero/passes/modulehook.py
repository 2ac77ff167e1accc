"""Module hooks that copies, pickles and compiled versions of the module do not have."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from shardwise.compat import never_compiled


def _nothing(*_: Any, **__: Any) -> None: ...


def _in_a_copy() -> Callable[..., None]:
    return _nothing


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a bound method while its object is alive, without a reference to the object."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> Any:
        alive = reference()
        return None if alive is None else alive(*args, **kwargs)

    return call


class ModuleHook:
    """Hook of one module: calls `function` outside of compiled regions, and does nothing in a copy of the module.

    Because `copy.deepcopy`, `pickle` and `torch.save` copy hooks with their module, the engine's hooks would treat the
    copy as part of the engine's model, and local functions cannot be pickled.
    """

    __slots__ = ("function",)

    may_wait_for_ranks = True
    """Whether the module's forward may wait for other ranks; a single rank must call a copy of the module instead."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    @never_compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self.function(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _in_a_copy, ()
