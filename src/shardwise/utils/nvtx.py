"""A script's own ranges in profiles: around calls of a function, or between two places.

While torch's profiler is on, ranges are its records; else NVTX ranges of NVIDIA's profilers, if the process uses a CUDA
device. Without either, a range costs one check of a flag.
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

_open = threading.local()  # Ranges that this thread has begun by `range_push`, the innermost last.


def instrument_w_nvtx(func: Callable[P, R]) -> Callable[P, R]:
    """Show every call of a function in profiles, by the function's qualified name.

    `torch.compile` compiles the function without the range.

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
    """Begin a range named `msg` within the open ranges of this thread; return the number of these."""
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
    """End the newest range of this thread; return the number of ranges around it, or -1 without one.

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
    """Return True if torch's profiler is on, in any thread, or if torch has no flag for it."""
    return getattr(profiler, "_is_profiler_enabled", True)
