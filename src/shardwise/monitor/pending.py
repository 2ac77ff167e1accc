"""Events with values on a device: validated at once, read after their asynchronous copy."""

from __future__ import annotations

import operator
import time
from collections.abc import Iterable
from typing import Any

import torch

from shardwise.device import Later
from shardwise.errors import UsageError

from .service import Event


class Pending:
    """The events of one `write_events` call. Values on a CUDA device are copied asynchronously.

    >>> [event[:3] for event in Pending([("loss", 0.5, 1), ("norm", torch.tensor(2.0), 1)]).read()]
    [('loss', 0.5, 1), ('norm', 2.0, 1)]
    """

    def __init__(self, events: Iterable[Any]) -> None:
        self._time = time.time()
        self._events: list[tuple[str, float | None, int]] = []
        away: list[torch.Tensor] = []
        for event in events:
            name, value, step = _checked(event)
            if isinstance(value, torch.Tensor):
                away.append(value)
                self._events.append((name, None, step))
            else:
                self._events.append((name, value, step))
        # Values on one device are stacked into one copy.
        alike = len({value.device for value in away}) <= 1
        joined = [torch.stack(away)] if away and alike else [value.reshape(1) for value in away]
        self._later = [Later(values) for values in joined]

    def __len__(self) -> int:
        return len(self._events)

    def arrived(self) -> bool:
        """Return True if `read` does not block."""
        return all(later.arrived() for later in self._later)

    def read(self) -> list[Event]:
        """Return the events, waiting for pending copies."""
        arrived = iter([value for later in self._later for value in later.read()])
        return [
            Event(name, next(arrived) if value is None else value, step, self._time)
            for name, value, step in self._events
        ]


def _checked(event: Any) -> tuple[str, float | torch.Tensor, int]:
    """Return name, value and step. A device value is a 0-D fp64 tensor."""
    try:
        name, value, step = event
    except (TypeError, ValueError):
        raise UsageError(f"write_events(): expected (name, value, step), found {event!r}") from None
    if not isinstance(name, str) or not name or "\0" in name:
        raise UsageError(f"write_events(): the name of an event is a string that is not empty, found {name!r}")
    try:
        at = int(step) if isinstance(step, float) and step.is_integer() else operator.index(step)
    except TypeError:
        raise UsageError(f"write_events(): the step of {name!r} is an integer, found {step!r}") from None
    if isinstance(value, torch.Tensor):
        value = value.detach()
        if value.numel() == 1 and value.device.type != "cpu":
            return name, value.reshape(()).double(), at
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        return name, float(value), at
    except (TypeError, ValueError, RuntimeError):
        found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
        raise UsageError(
            f"write_events(): the value of {name!r} is a number or a tensor of one element, found {found}"
        ) from None
