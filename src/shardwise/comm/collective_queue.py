"""Queues of collectives: chains, in which each collective needs the result of the one before, behind one `wait()`.

Later collectives of a chain are launched without the caller, because other ranks may already wait for them. With a CUDA
stream of the queue (`shardwise.device.streams`) the whole chain is launched at once, and the caller's stream waits
where it needs the result. Where waiting blocks the host, a thread launches later collectives, chain by chain in the
order of their starts, which is the same on all ranks.
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
from typing import Any, Protocol, cast

import torch

from shardwise.comm import native
from shardwise.comm.ledger import Record, on_behalf_of, user_line
from shardwise.device.streams import Mark, Streams
from shardwise.errors import PeerLostError


class Work(Protocol):
    """Launched collectives: one, a chain, or an event behind them."""

    def wait(self) -> None:
        """Block until the result is there (on CUDA: make the current stream wait for it)."""


Launch = Callable[[], native.PendingCollective]
_LEAVING_S, _EXITING_S, _FAILED_S = 1.0, 10.0, 0.5
"""Seconds for which a thread is waited for: when its engine is closed, at a normal exit, and after an error."""

_open: weakref.WeakSet[CollectiveQueue] = weakref.WeakSet()


Made = Callable[[torch.Tensor], None]
"""Called with each buffer that a collective has allocated."""


class WorkChain:
    """Collectives that run one after the other, the first of which has been launched."""

    def __init__(self, first: Work, rest: Sequence[Launch], made: Made | None = None) -> None:
        self._handle = first
        self._rest = list(rest)
        self._made = made
        self._line = user_line()
        self._begun, self._ended = threading.Event(), threading.Event()
        self._records: list[Record] = []  # of ended collectives
        self._error: BaseException | None = None

    def run(self) -> None:
        """Run the collectives; `wait()` raises their error."""
        try:
            with on_behalf_of(self._line):
                self._handle.wait()
                self._note()
                self._begun.set()
                while self._rest:
                    self._launch_next()
                    self._handle.wait()
                    self._note()
        except BaseException as error:
            self._error = error
        finally:
            self._rest = []
            self._begun.set()
            self._ended.set()

    def _launch_next(self) -> None:
        pending = self._rest.pop(0)()
        if self._made is not None:
            for number in range(len(pending.scratch)):  # no variable keeps a buffer while `wait` runs
                self._made(pending.scratch[number])
        self._handle = pending  # nothing else refers to its buffers once it has ended

    def wait_first(self) -> None:
        """Block until the first collective has ended: its input may then be written; raises as `Handle.wait`."""
        self._wait(self._begun)

    def wait(self) -> None:
        """Block until the last collective has ended; raises as `wait_first`."""
        self._wait(self._ended)

    def _note(self) -> None:
        """Because the collective has not blocked the training thread so far, its record begins without waiting time."""
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


class _Imagined(WorkChain):
    """A chain of a dry run, which allocates the buffers of a real one and exchanges nothing."""

    def wait_first(self) -> None:
        self._handle.wait()
        while self._rest:
            self._handle.wait()
            self._launch_next()

    def wait(self) -> None:
        self.wait_first()
        self._handle.wait()


class CollectiveQueue:
    """Runs chains of collectives, one after the other.

    The queue's CUDA stream waits for the current stream only at `follow`: collectives run ahead of computation. Where
    waiting blocks the host (`waits_on_host`), and on a single rank, collectives run on the current stream. `imagined`
    is a dry run with fake ranks. The host waits at most `limit` for the end of a chain.
    """

    def __init__(
        self, streams: Streams, *, waits_on_host: bool, name: str, limit: timedelta, imagined: bool = False
    ) -> None:
        self._name = name
        self._imagined = imagined
        self._limit = limit
        self._queue: queue.SimpleQueue[WorkChain | None] = queue.SimpleQueue()
        weakref.finalize(self, self._queue.put, None)  # ends the thread
        self._thread: threading.Thread | None = None
        self._streams = streams
        self._unawaited = False
        self._stream = None if waits_on_host else streams.make(name)

    def follow(self) -> None:
        """Make the queue's stream wait for the present work of the current stream."""
        if self._stream is not None and self._streams.beside:
            self._stream.wait(self._streams.mark())

    def leave(self) -> None:
        """Note that no stream has waited for a collective, because its result is not needed."""
        self._unawaited = True

    def catch_up(self) -> None:
        """Wait for the queue's stream after `leave`: collectives may read memory that this stream is about to write."""
        if self._unawaited:
            self._unawaited = False
            self.mark().wait()

    def aside(self) -> AbstractContextManager[Any]:
        """Allocate and launch on the queue's stream inside the block."""
        return (self._stream or self._streams.current()).use()

    def mark(self) -> Mark:
        """Record an event behind the present work of the queue's stream."""
        with self.aside():
            return self._streams.mark()

    def start(self, launches: Sequence[Launch], made: Made | None = None) -> Work:
        """Launch the first collective of a chain, and queue the others; with a stream, return an event behind it.

        `made` may be called on the queue's thread.
        """
        if self._stream is not None:
            with self._stream.use():
                native.thread.in_order = True
                try:
                    for launch in launches:
                        work = launch()
                        if made is not None:
                            for number in range(len(work.scratch)):  # no variable keeps a buffer while `wait` runs
                                made(work.scratch[number])
                        work.wait()
                finally:
                    native.thread.in_order = False
                return self._streams.mark()
        first = launches[0]()
        if made is not None:
            for buffer in first.scratch:
                made(buffer)
        if len(launches) == 1:
            return first
        if self._imagined:
            return _Imagined(first, launches[1:], made)
        chain = WorkChain(first, launches[1:], made)
        if self._thread is None:
            name = f"shardwise-{self._name}"
            self._thread = threading.Thread(target=_work, args=(self._queue,), name=name, daemon=True)
            self._thread.start()
            _open.add(self)
            atexit.unregister(_close_all)
            atexit.register(_close_all)
        self._queue.put(chain)
        return chain

    def synchronize(self, link: Work | Mark, what: str) -> None:
        """Block the host until a chain has ended: its input may then be released on any stream.

        Raises as `Handle.wait`, and PeerLostError if the chain has not ended on the device within the limit.
        """
        if self._stream is None:
            link.wait()
        elif not self._streams.block(cast("Mark", link), self._limit):
            lost = PeerLostError(
                f"{what} has not ended on the device within {self._limit} (the limit for a collective: "
                "SHARDWISE_TIMEOUT, in minutes): a rank has gone, or is elsewhere"
            )
            lost.timed_out = True
            raise lost

    def close(self, limit: float = _LEAVING_S) -> None:
        """End the thread after the queued chains; wait at most `limit` seconds."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(limit)
            self._thread = None


def _work(chains: queue.SimpleQueue[WorkChain | None]) -> None:
    while (chain := chains.get()) is not None:
        chain.run()
        del chain  # because it refers to the engine


def _close_all() -> None:
    # A thread inside of torch aborts the process at the end of the interpreter or of its groups.
    # After an uncaught exception the process ends soon, because its peers must see it gone.
    limit = _EXITING_S if getattr(sys, "last_value", None) is None else _FAILED_S
    for runner in list(_open):
        runner.close(limit)
