"""Chains: collectives of which each needs the result of the one before, behind one `wait()`.

A rank that has launched a chain must not hold the others up because it does not wait for it yet: what comes after the
first collective is launched without the caller. Where waiting blocks the host, a small thread does it, one chain after
the other in the order in which they were begun, which is the same on all ranks. Elsewhere all of it is queued at once,
on a stream of its own, so that the caller's stream does not wait for the links of the chain.
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from shardwise.comm.ledger import on_behalf_of, user_line


class Link(Protocol):
    """A collective, or several, under way."""

    @property
    def scratch(self) -> Sequence[torch.Tensor]:
        """Buffers that it has made for itself; `wait()` gives them back."""

    def wait(self) -> None:
        """Block until the result is there (on CUDA: make the current stream wait for it)."""


Launch = Callable[[], Link]
_LEAVING_S, _EXITING_S, _FAILED_S = 1.0, 10.0, 0.5
"""How long a thread is waited for: when its engine is closed, when the process ends, and when it ends in an error."""

_open: weakref.WeakSet[Runner] = weakref.WeakSet()


class Chain:
    """Collectives under way, the first of which has been launched.

    Attributes:
        scratch: buffers that the collectives launched so far have made for themselves.
    """

    def __init__(self, first: Link, rest: Sequence[Launch]) -> None:
        self._handle = first
        self._rest = list(rest)
        self._line = user_line()
        self._begun, self._ended = threading.Event(), threading.Event()
        self._error: BaseException | None = None

    @property
    def scratch(self) -> Sequence[torch.Tensor]:
        """See above; `wait()` gives them back."""
        return self._handle.scratch

    def run(self) -> None:
        """Go through the collectives; an error is kept for whoever waits."""
        try:
            with on_behalf_of(self._line):
                self._handle.wait()
                self._begun.set()
                while self._rest:
                    self._handle = self._rest.pop(0)()  # nothing refers to its buffers once it has ended
                    self._handle.wait()
        except BaseException as error:
            self._error = error
        finally:
            self._rest = []
            self._begun.set()
            self._ended.set()

    def wait_first(self) -> None:
        """Block until the first collective has ended, so that what it has sent may change.

        Raises:
            PeerLostError: see `shardwise.comm.communicator.Handle.wait`.
            DesyncError: see there.
        """
        self._wait(self._begun)

    def wait(self) -> None:
        """Block until the last collective has ended; raises as `wait_first` does."""
        self._wait(self._ended)

    def _wait(self, event: threading.Event) -> None:
        event.wait()
        if self._error is not None:
            raise self._error


class _Queued(Chain):
    """A chain whose collectives have all been launched, behind one another, on a stream."""

    def wait_first(self) -> None:
        """Make the current stream wait for the end of the chain: what has been sent is given back behind it."""
        self.wait()

    def wait(self) -> None:
        """Make the current stream wait for the end of the chain."""
        if self._error is not None:
            raise self._error
        self._handle.wait()

    def run(self) -> None:
        """Launch the collectives; the last one is waited for on the stream that needs it."""
        with on_behalf_of(self._line):
            for launch in self._rest:
                self._handle.wait()
                self._handle = launch()
        self._rest = []


class _Imagined(_Queued):
    """A chain of which nothing is exchanged: it holds all that one may hold at each moment that a thread goes through.

    What comes after the first collective is launched as soon as that has ended, and ends when it is waited for.
    """

    def wait_first(self) -> None:
        """End the first collective, and launch the others."""
        self.run()

    def wait(self) -> None:
        """End all."""
        self.run()
        self._handle.wait()


class Runner:
    """Takes chains on, one after the other.

    Args:
        device: where the collectives' tensors lie.
        waits_on_host: whether waiting for a collective blocks the host.
        name: of the thread.
        imagined: there is nobody to exchange anything with.
    """

    def __init__(self, device: torch.device, *, waits_on_host: bool, name: str, imagined: bool = False) -> None:
        self._name = name
        self._imagined = imagined
        self._queue: queue.SimpleQueue[Chain | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._on_host = waits_on_host
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" and not waits_on_host else None

    def start(self, launches: Sequence[Launch]) -> Link:
        """Launch the first of some collectives, and see to it that the others follow."""
        if len(launches) == 1:
            return launches[0]()
        if self._imagined:
            return _Imagined(launches[0](), launches[1:])
        if not self._on_host:
            if self._stream is not None:
                self._stream.wait_stream(torch.cuda.current_stream())
            with self._aside():
                queued = _Queued(launches[0](), launches[1:])
                queued.run()
            return queued
        chain = Chain(launches[0](), launches[1:])
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
            _open.add(self)
            atexit.unregister(_close_all)
            atexit.register(_close_all)
        self._queue.put(chain)
        return chain

    def close(self, limit: float = _LEAVING_S) -> None:
        """End the thread behind the chains that it has, if none waits for a rank that will not come within `limit`."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(limit)
            self._thread = None

    def _aside(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _work(self) -> None:
        while (chain := self._queue.get()) is not None:
            chain.run()


def _close_all() -> None:
    # A thread that is still inside of torch when the interpreter goes, or whose groups go, would take the process down.
    # After an exception that nobody has caught the peers must see this process gone, and it does not linger.
    limit = _EXITING_S if getattr(sys, "last_value", None) is None else _FAILED_S
    for runner in list(_open):
        runner.close(limit)
