"""Monitor events and the interface of monitor services."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeVar


class Event(NamedTuple):
    """One measured value.

    Attributes:
        name: name of the series, with parts separated by "/".
        value: may be infinite or NaN.
        step: place on the x axis; for the engine's own events, the samples of all ranks so far.
        time: time of the `write_events` call, in seconds since 1970.
    """

    name: str
    value: float
    step: int
    time: float


Taken = TypeVar("Taken", contravariant=True)
Brought = TypeVar("Brought", covariant=True)


class EventBatch(Protocol[Brought]):
    """A batch of events; some values may still be in transit from a device."""

    def __len__(self) -> int:
        """Return the number of events."""

    def read(self) -> Sequence[Brought]:
        """Return the events, waiting for pending copies."""


class Service(Protocol[Taken]):
    """Backend of a monitor, by default for events. Its methods run on one thread, may block, and may raise."""

    def open(self) -> None:
        """Prepare the backend, before the first events and after any exception; working resources may be kept."""

    def log(self, events: Sequence[Taken]) -> None:
        """Write events in order; called again with the same events after an exception."""

    def flush(self) -> None:
        """Make written events survive any end of the process. No effect if `log` does."""

    def close(self) -> None:
        """Close the backend; only called after a successful `open`."""
