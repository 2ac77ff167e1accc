"""Chains: collectives of which each needs the result of the one before, behind one `wait()`.

A rank that has launched a chain must not hold the others up because it does not wait for it yet: what comes after the
first collective is launched without the caller. Where waiting blocks the host, a small thread does it, one chain after
the other in the order in which they were begun, which is the same on all ranks. Elsewhere all of it is queued at once
on a stream of its own (`shardwise.device.streams`), which the caller's stream waits for when it needs the result.
"""

from __future__ import annotations

import atexit
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Protocol

import torch

from shardwise.comm import native
from shardwise.comm.ledger import Record, on_behalf_of, user_line
from shardwise.device.streams import Mark, Stream, Streams
from shardwise.errors import PeerLostError


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
        self._records: list[Record] = []  # of what has ended
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
                self._note()
                self._begun.set()
                while self._rest:
                    self._handle = self._rest.pop(0)()  # nothing refers to its buffers once it has ended
                    self._handle.wait()
                    self._note()
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

    def _note(self) -> None:
        """The thread has waited, which has blocked nobody who trains so far."""
        record = getattr(self._handle, "record", None)
        if record is not None:
            record.waited = 0.0
            self._records.append(record)

    def _wait(self, event: threading.Event) -> None:
        since = time.perf_counter()
        event.wait()
        for record in list(self._records):
            if record.finished is not None and record.finished > since:
                record.waited = record.finished - max(since, record.launched)
        if self._error is not None:
            raise self._error


class Queued:
    """Collectives that have been launched behind one another on a stream of their own.

    Attributes:
        scratch: nothing: their buffers belong to that stream, and need not be held.
        mark: the end of the last one.
    """

    scratch: Sequence[torch.Tensor] = ()

    def __init__(self, mark: Mark) -> None:
        self.mark = mark

    def wait(self) -> None:
        """Let the current stream go on behind the last collective."""
        self.mark.wait()


class _Imagined(Chain):
    """A chain of which nothing is exchanged: it holds all that one may hold at each moment that a thread goes through.

    What comes after the first collective is launched as soon as that has ended, and ends when it is waited for.
    """

    def wait_first(self) -> None:
        """End the first collective, and launch the others."""
        self._handle.wait()
        while self._rest:
            self._handle.wait()
            self._handle = self._rest.pop(0)()

    def wait(self) -> None:
        """End all."""
        self.wait_first()
        self._handle.wait()


class Runner:
    """Takes chains on, one after the other.

    On a device with streams all collectives of a chain are queued at once, on a stream of the runner's own. It waits
    for the current stream only where `follow` says so: collectives run ahead of what is computed. Where waiting blocks
    the host, everything is launched on the current stream: nothing else would make that wait for what is launched here.
    So are the reductions of a single rank, which has no peers.

    Args:
        streams: of the device on which the collectives' tensors lie.
        waits_on_host: whether waiting for a collective blocks the host.
        name: of the stream, or of the thread.
        limit: how long the host waits for the end of a chain.
        imagined: there is nobody to exchange anything with.
    """

    def __init__(
        self, streams: Streams, *, waits_on_host: bool, name: str, limit: timedelta, imagined: bool = False
    ) -> None:
        self._name = name
        self._imagined = imagined
        self._limit = limit
        self._queue: queue.SimpleQueue[Chain | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._on_host = waits_on_host
        self._streams = streams
        self._unawaited = False
        self._own_stream = None if waits_on_host else streams.make(name)

    @property
    def _stream(self) -> Stream:
        return self._streams.current() if self._own_stream is None else self._own_stream

    def follow(self) -> None:
        """Let what is launched from now on run behind what the current stream has been given so far."""
        if self._own_stream is not None and self._streams.beside:
            self._own_stream.wait(self._streams.mark())

    def leave(self) -> None:
        """Note that no stream has waited for something that was launched here, and that no stream needs."""
        self._unawaited = True

    def catch_up(self) -> None:
        """Have the current stream wait for all that was launched here, if `leave` has been called: it may be written.

        What was launched may still read memory that the current stream is about to write.
        """
        if self._unawaited:
            self._unawaited = False
            self.mark().wait()

    def aside(self) -> AbstractContextManager[Any]:
        """Allocate and launch for the runner's stream inside of the block."""
        return self._stream.use()

    def mark(self) -> Mark:
        """Return the place to which the runner's stream has got."""
        with self._stream.use():
            return self._streams.mark()

    def start(self, launches: Sequence[Launch], made: Callable[[torch.Tensor], None] | None = None) -> Link:
        """Launch the first of some collectives, and see to it that the others follow.

        Args:
            launches: see `Chain`.
            made: is told of buffers that the first one has made for itself.
        """
        if not self._on_host:
            return self._queue_up(launches, made)
        first = launches[0]()
        _tell(first, made)
        if len(launches) == 1:
            return first
        if self._imagined:
            return _Imagined(first, launches[1:])
        chain = Chain(first, launches[1:])
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"shardwise-{self._name}", daemon=True)
            self._thread.start()
            _open.add(self)
            atexit.unregister(_close_all)
            atexit.register(_close_all)
        self._queue.put(chain)
        return chain

    def _queue_up(self, launches: Sequence[Launch], made: Callable[[torch.Tensor], None] | None) -> Queued:
        with self._stream.use(), native.in_order():
            for launch in launches:
                handle = launch()
                _tell(handle, made)
                handle.wait()
            return Queued(self._streams.mark())

    def synchronize(self, link: Link, what: str) -> None:
        """Block the host until a chain has ended: what it has sent may be given back, whatever stream it belongs to.

        Args:
            link: what `start` returned.
            what: the chain, for errors.

        Raises:
            PeerLostError: it has not ended within the limit, or see `shardwise.comm.communicator.Handle.wait`.
            DesyncError: see there.
        """
        if not isinstance(link, Queued):
            link.wait()
        elif not self._streams.block(link.mark, self._limit):
            lost = PeerLostError(
                f"{what} has not ended on the device within {self._limit} (the limit for a collective: "
                "SHARDWISE_TIMEOUT, in minutes): a rank has gone, or is elsewhere"
            )
            lost.timed_out = True
            raise lost

    def close(self, limit: float = _LEAVING_S) -> None:
        """End the thread behind the chains that it has, if none waits for a rank that will not come within `limit`."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(limit)
            self._thread = None

    def _work(self) -> None:
        while (chain := self._queue.get()) is not None:
            chain.run()


def _tell(link: Link, made: Callable[[torch.Tensor], None] | None) -> None:
    if made is not None:
        for buffer in link.scratch:
            made(buffer)


def _close_all() -> None:
    # A thread that is still inside of torch when the interpreter goes, or whose groups go, would take the process down.
    # After an exception that nobody has caught the peers must see this process gone, and it does not linger.
    limit = _EXITING_S if getattr(sys, "last_value", None) is None else _FAILED_S
    for runner in list(_open):
        runner.close(limit)
