"""What is written, and what a place to write it to has to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeVar


class Event(NamedTuple):
    """One measured value.

    Attributes:
        name: of the series, with parts separated by "/".
        value: may be infinite or NaN.
        step: place on the x axis; the engine's own events have the samples of all ranks so far.
        time: when it was handed over, in seconds since 1970.
    """

    name: str
    value: float
    step: int
    time: float


Taken = TypeVar("Taken", contravariant=True)
Brought = TypeVar("Brought", covariant=True)


class EventBatch(Protocol[Brought]):
    """What is handed over at once; some of it may still be on its way from a device."""

    def __len__(self) -> int:
        """Return how many it brings."""

    def read(self) -> Sequence[Brought]:
        """Return what it brings, waiting for what is still under way."""


class Service(Protocol[Taken]):
    """A place to write to; what it takes are events, if not said otherwise.

    Its methods are called on one thread, may take as long as they need, and may raise.
    """

    def open(self) -> None:
        """Get ready. Called before the first events, and again after anything has raised: what is still good stays."""

    def log(self, events: Sequence[Taken]) -> None:
        """Take events, in the order in which they were handed over; the same ones again if it has raised before."""

    def flush(self) -> None:
        """Have what was taken survive the end of this process, however it comes. Nothing to do where `log` does."""

    def close(self) -> None:
        """End in order; only called if `open` has succeeded."""
