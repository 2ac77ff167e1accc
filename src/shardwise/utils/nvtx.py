"""Ranges of a script's own in profiles: around calls of a function, or between two places.

torch's profiler shows them where it is on. Elsewhere they are NVTX ranges, which NVIDIA's profilers show, once the
process uses a CUDA device. Where neither is, a range is one look at a flag.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch.autograd import profiler
from torch.compiler import is_compiling

P = ParamSpec("P")
R = TypeVar("R")

_open = threading.local()
"""The ranges that this thread has begun by `range_push`, the innermost last."""


def instrument_w_nvtx(func: Callable[P, R]) -> Callable[P, R]:
    """Have every call of a function shown in profiles, by the function's qualified name.

    Under `torch.compile` the function is compiled as if it were bare.

    Args:
        func: of any arguments; also a method.

    Returns:
        A function that does the same.

    Example:
        >>> @instrument_w_nvtx
        ... def twice(value):
        ...     return 2 * value
        >>> with torch.profiler.profile() as profile:
        ...     _ = twice(1)
        >>> profile.events()[0].name
        'twice'
    """
    name = getattr(func, "__qualname__", repr(func))

    @functools.wraps(func)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if is_compiling():
            return func(*args, **kwargs)
        if _profiled():
            with torch.profiler.record_function(name):
                return func(*args, **kwargs)
        if torch.cuda.is_initialized():
            with torch.cuda.nvtx.range(name):
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    return call


def range_push(msg: str) -> int:
    """Begin a range within those that this thread has begun.

    Args:
        msg: its name.

    Returns:
        How many ranges of this thread are around it.
    """
    stack = _stack()
    shown: Any = None
    if _profiled():
        shown = torch.profiler.record_function(msg)
    elif torch.cuda.is_initialized():
        shown = torch.cuda.nvtx.range(msg)
    if shown is not None:
        shown.__enter__()
    stack.append(shown)
    return len(stack) - 1


def range_pop() -> int:
    """End the range that this thread has begun last; without one nothing happens.

    Returns:
        How many ranges of this thread were around it; -1 if there was none.

    Example:
        >>> range_push("outer"), range_push("inner"), range_pop(), range_pop(), range_pop()
        (0, 1, 1, 0, -1)
    """
    stack = _stack()
    if not stack:
        return -1
    shown = stack.pop()
    if shown is not None:
        shown.__exit__(None, None, None)
    return len(stack)


def _stack() -> list[Any]:
    if not hasattr(_open, "ranges"):
        _open.ranges = []
    ranges: list[Any] = _open.ranges
    return ranges


def _profiled() -> bool:
    """Whether torch's profiler is on, in any thread; where torch does not tell, it might be."""
    return getattr(profiler, "_is_profiler_enabled", True)
