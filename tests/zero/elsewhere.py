"""A place for state that is no device: another buffer, which tells how it is used."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from shardwise.device.streams import streams_of
from shardwise.memory import Tier
from shardwise.memory.places import Where
from shardwise.offload import PLACES
from shardwise.zero.units.plan import Plan

NAME = "elsewhere"


class Elsewhere:
    """Keeps values in tensors of its own; copies run on a stream of their own, as those to the host would.

    Args:
        frees: take the memory of what is not acquired, so that using it fails; else fill it with NaN, so that values
            that come from it are seen.

    Attributes:
        acquired: bytes that are acquired now.
        most: most that have been at once.
        tiered: how often something has been acquired.
    """

    tier = Tier.HOST
    needs_acquiring = True
    at_hand = False
    lags = False
    used_on = None

    def __init__(self, *, frees: bool) -> None:
        self.frees = frees
        self.acquired = self.most = self.tiered = 0

    def on(self, device: torch.device) -> Elsewhere:
        """Be the place of an engine."""
        self.streams = streams_of(device)
        self.transfers = self.streams.make("transfers")
        return self

    def keep(self, tensor: torch.Tensor) -> Held:
        self.moved(tensor.nbytes)
        return Held(self, tensor)

    def close(self) -> None:
        pass

    def moved(self, size: int) -> None:
        self.acquired += size
        self.most = max(self.most, self.acquired)


class Held:
    """One tensor that is kept."""

    staged = held = 0

    def __init__(self, place: Elsewhere, tensor: torch.Tensor) -> None:
        self._place = place
        self._storage = tensor.untyped_storage()
        self._size = self._storage.nbytes()
        self._bytes = torch.empty(0, dtype=torch.uint8).set_(self._storage)
        self._blank = torch.tensor([torch.nan if tensor.is_floating_point() else 0], dtype=tensor.dtype)
        self._values = torch.empty_like(self._bytes)
        self._state = "lent"
        self._moved = place.streams.mark()

    def start(self, *, read: bool) -> None:
        assert self._state == "kept", self._state
        self._state = "coming"
        self._place.tiered += 1
        self._place.moved(self._size)
        with self._place.transfers.use():
            if self._place.frees:
                self._storage.resize_(self._size)
            if read:
                self._bytes.copy_(self._values)
            self._moved = self._place.streams.mark()

    def finish(self) -> None:
        assert self._state in ("coming", "lent"), self._state
        self._state = "lent"
        self._moved.wait()

    def give_back(self, *, written: bool) -> None:
        if self._state == "kept":  # its start has failed
            assert not written
            return
        assert not written or self._state == "lent"
        self._state = "kept"
        self._place.moved(-self._size)
        self._place.transfers.wait(self._place.streams.mark())
        with self._place.transfers.use():
            if written:
                self._values.copy_(self._bytes)
            if self._place.frees:
                self._storage.resize_(0)
            else:
                self._bytes.view(self._blank.dtype).copy_(self._blank.expand(self._size // self._blank.itemsize))
            self._moved = self._place.streams.mark()

    def __del__(self) -> None:
        if self._state != "kept":  # it is left to whoever has the tensor
            self._place.moved(-self._size)

    def settle(self) -> None:
        assert self._state != "lent"

    def look_ahead(self, target: torch.Tensor | None = None) -> None:
        pass

    def exchange(self, other: Held) -> None:
        assert self._state == other._state == "kept"
        self._values, other._values = other._values, self._values

    def in_place(self) -> torch.Tensor:
        raise AssertionError("it has to be lent")

    def shared(self) -> torch.Tensor:
        return self.in_place()

    def copy_to(self, target: torch.Tensor) -> None:
        assert target.nbytes == self._size
        self._moved.wait()
        target.view(torch.uint8).copy_(self._values)


@contextmanager
def living_elsewhere(*kinds: str, frees: bool = True, forced: bool = False) -> Iterator[Elsewhere]:
    """Have engines keep some kinds of state (`optimizer`, `gradients`, `parameters`) elsewhere."""
    place = Elsewhere(frees=frees)
    plan = functools.partial(Plan.of, forced=forced, where=Where(**dict.fromkeys(kinds, NAME)))
    with mock.patch.object(Plan, "of", plan), mock.patch.dict(PLACES, {NAME: place.on}):
        yield place


@contextmanager
def forced() -> Iterator[None]:
    """Have engines divide state over one rank, too."""
    with mock.patch.object(Plan, "of", functools.partial(Plan.of, forced=True)):
        yield
