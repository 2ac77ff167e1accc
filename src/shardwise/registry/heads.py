"""Which attention heads a rank computes, for layers in which heads differ (sparse attention).

Tensor parallelism sets the numbers on a module, sequence parallelism selects some of them during a call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

from torch import nn

from shardwise.errors import UsageError

_NUMBERS = "shardwise_heads"
_run: ContextVar[tuple[int, int] | None] = ContextVar("heads of this call", default=None)


def set_heads(module: nn.Module, numbers: Sequence[int] | None) -> None:
    """Set the numbers of the heads that this rank has of an attention module; None: all."""
    setattr(module, _NUMBERS, None if numbers is None else tuple(numbers))


@contextlib.contextmanager
def some_heads(first: int, end: int) -> Iterator[None]:
    """Let calls inside compute the heads [first, end) of those that the rank has."""
    before = _run.set((first, end))
    try:
        yield
    finally:
        _run.reset(before)


def heads_of(module: Any, count: int, total: int) -> tuple[int, ...]:
    """Return the numbers of the `count` heads of a call, of `total` heads of all ranks.

    Raises a UsageError if they are unknown: a layer that is divided by other means has fewer heads than its layout.
    """
    numbers: tuple[int, ...] = getattr(module, _NUMBERS, None) or tuple(range(total))
    run = _run.get()
    found = numbers if run is None else numbers[slice(*run)]
    if len(found) != count or found[-1] >= total:
        raise UsageError(
            f"sparse attention ({type(module).__name__}): a call has {count} heads, and the layout has {total} "
            f"(num_heads), of which this rank computes {len(found)}. Where ranks divide heads by code of your own, "
            "make the layout with the heads of a rank"
        )
    return found
