"""Named ranges: what a profiler's trace says about the time between a model's own operators."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

Listener = Callable[[str], AbstractContextManager[Any]]
"""Returns what is around a range, of which it is told `what`."""

_listener: Listener | None = None


def named(what: str, unit: str = "") -> AbstractContextManager[Any]:
    """Return a context that torch's profiler (and NVTX, under `emit_nvtx`) shows by this name.

    Args:
        what: "gather", "wait for gather", "reduce", "wait for reduction" or "step".
        unit: whose parameters or gradients they are.

    Example:
        >>> with torch.profiler.profile() as profile, named("gather", "layers.0"):
        ...     pass
        >>> profile.events()[0].name
        'shardwise::gather layers.0'
    """
    shown = torch.profiler.record_function(f"shardwise::{what} {unit}".rstrip())
    return shown if _listener is None else _heard(shown, _listener(what))


@contextlib.contextmanager
def _heard(shown: AbstractContextManager[Any], around: AbstractContextManager[Any]) -> Iterator[None]:
    with shown, around:
        yield


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Have somebody told of the ranges inside of the block, on all threads: a device's backward pass has its own.

    Example:
        >>> heard = []
        >>> with listening(lambda what: contextlib.nullcontext(heard.append(what))), named("reduce", "head"):
        ...     pass
        >>> heard
        ['reduce']
    """
    global _listener
    before, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = before
