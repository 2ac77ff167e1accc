"""Worker thread of a monitor service: `put` never waits for the service.

A bounded queue holds events, and the thread empties it every `PAUSE_S`. Because `put` does not wake the thread, many
steps share file operations and thread switches. A failed service is retried after increasing pauses; a slow or
unavailable one loses the oldest events. Both are logged. Each service has its own thread, because a hanging network
service must not delay files.
"""

from __future__ import annotations

import atexit
import functools
import os
import threading
import weakref
from collections import deque
from time import monotonic
from typing import Any

from shardwise.utils.logging import logger

from .service import EventBatch, Service

PAUSE_S = 1.0  # Seconds between two checks of the queue; a killed process loses at most the events of this time.
ROOM = 20_000  # Maximum queued events of a service; about a quarter of an hour at 4 steps a second.
AT_ONCE = 1000  # maximum events in one call of a service, unless one call of `write_events` has more
ATTEMPTS = 3  # number of attempts for the same events, because rejected events must not block the queue
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
REPORT_AGAIN_S = 600.0  # minimum seconds between two warnings about recurring failures
CLOSE_S = 30.0  # maximum seconds that the end of a run waits for a service


class Worker:
    """Thread and queue (of at most `room` events) of one service, which only this thread uses."""

    def __init__(self, name: str, service: Service[Any], room: int = ROOM) -> None:
        self.name = name
        self._service = service
        self._room = room
        self._queue: deque[EventBatch[Any]] = deque()
        self._changed = threading.Condition()
        self._held = self._lost = self._reported_lost = 0
        self._busy = self._closing = self._is_open = False
        self._flush_requested = False  # request to check the queue now
        self._pause = SHORTEST_PAUSE_S
        self._failing = self._reported_failing = False
        self._reported_at = -REPORT_AGAIN_S
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name=f"shardwise-monitor-{name}", daemon=True)
        _close_at_exit()
        _running.add(self)
        self._thread.start()

    # -- on the thread of training -------------------------------------------------------------------------------------

    def put(self, events: EventBatch[Any], *, now: bool = False) -> None:
        """Queue events, dropping the oldest if the queue is full; `now` writes the queue at once."""
        dropped = False
        with self._changed:
            if self._closing:
                return
            self._queue.append(events)
            self._held += len(events)
            while self._held > self._room and len(self._queue) > 1:
                oldest = self._queue.popleft()
                self._held -= len(oldest)
                dropped |= self._lost == 0
                self._lost += len(oldest)
            much = self._held >= AT_ONCE and not self._flush_requested
        if now or much:
            self.flush_soon()
        if dropped:
            logger.warning(
                "monitor %s: more than %d events wait for it, and the oldest are dropped; training goes on. Is the "
                "service reachable? Their number is logged at the end, and when the service is up to date again",
                self.name,
                self._room,
            )

    def flush(self, limit: float) -> bool:
        """Wait up to `limit` seconds until all events are written; return True if they are."""
        self.flush_soon()
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue and not self._busy, limit)

    def flush_soon(self) -> None:
        """Request the writing of queued events, without waiting."""
        with self._changed:
            self._flush_requested = True
            self._changed.notify_all()

    def end(self) -> None:
        """Refuse new events and stop after the queued ones, without waiting."""
        if os.getpid() != self._process:
            return  # a forked process, which lacks the thread
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def close(self, limit: float = CLOSE_S) -> None:
        """Refuse new events and wait up to `limit` seconds for the end of the service. A second call does nothing."""
        if os.getpid() != self._process:
            return
        self.end()
        self._thread.join(max(0.0, limit))
        _running.discard(self)
        if self._thread.is_alive():
            logger.warning(
                "monitor %s: has not ended in time, and is left; %d events are not known to be written",
                self.name,
                self._held,
            )
        self._report_lost()

    # -- on the service's thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._ready()
        while True:
            taken = self._take()
            if not taken:
                break
            self._deliver(taken)
            with self._changed:
                self._busy = False
                self._held -= sum(map(len, taken))
                self._changed.notify_all()
        if self._is_open:
            try:
                self._service.close()
            except (Exception, SystemExit) as error:
                self._failed(error)

    def _take(self) -> list[EventBatch[Any]]:
        with self._changed:
            while not ((self._queue and self._flush_requested) or self._closing):
                if not self._changed.wait(PAUSE_S):
                    self._flush_requested = True
            taken: list[EventBatch[Any]] = []
            while self._queue and sum(map(len, taken)) < AT_ONCE:
                taken.append(self._queue.popleft())
            self._busy, self._flush_requested = bool(taken), bool(self._queue)
            return taken

    def _deliver(self, taken: list[EventBatch[Any]]) -> None:
        events: list[Any] = []
        for pending in taken:
            try:
                events.extend(pending.read())
            except RuntimeError as error:  # the device has failed, and its values are lost
                self._lose(len(pending))
                self._failed(error)
        for _ in range(ATTEMPTS):
            if self._ready() and self._offer(events):
                return
            with self._changed:
                if self._changed.wait_for(lambda: self._closing, self._pause):
                    break
            self._pause = min(2 * self._pause, LONGEST_PAUSE_S)
        self._lose(len(events))

    def _lose(self, count: int) -> None:
        with self._changed:
            self._lost += count

    def _ready(self) -> bool:
        if not self._is_open:
            try:
                self._service.open()
            except (Exception, SystemExit) as error:
                self._failed(error)
                return False
            self._is_open = True
        return True

    def _offer(self, events: list[Any]) -> bool:
        try:
            self._service.log(events)
            self._service.flush()
        except (Exception, SystemExit) as error:
            self._is_open = False
            self._failed(error)
            return False
        self._pause = SHORTEST_PAUSE_S
        if self._failing:
            self._failing = False
            if self._reported_failing:
                logger.info("monitor %s: works again", self.name)
        if not self._queue:
            self._report_lost()
        return True

    def _failed(self, error: BaseException) -> None:
        if self._failing:
            return
        self._failing = True
        self._reported_failing = monotonic() - self._reported_at >= REPORT_AGAIN_S
        if self._reported_failing:
            self._reported_at = monotonic()
            logger.warning(
                "monitor %s: %s: %s. Training goes on. It is tried again, and up to %d events are kept meanwhile; to "
                "do without it, set %s.enabled to false",
                self.name,
                type(error).__name__,
                str(error).rstrip("."),
                self._room,
                self.name,
            )

    def _report_lost(self) -> None:
        lost = self._lost
        if lost > self._reported_lost:
            logger.warning("monitor %s: %d events are lost since the beginning", self.name, lost)
            self._reported_lost = lost


_running: weakref.WeakSet[Worker] = weakref.WeakSet()


@functools.cache
def _close_at_exit() -> None:
    """Close all services at process exit, before the exit handlers of their packages run."""
    # Functions of `atexit` run in reverse order, and packages register theirs when a service opens: W&B would stop its
    # writer process while events are queued. The private function, for which `atexit` is the fallback, runs earlier.
    register = getattr(threading, "_register_atexit", atexit.register)
    register(_close_all)


def _close_all() -> None:
    until = monotonic() + CLOSE_S
    workers = list(_running)
    for worker in workers:
        worker.end()
    for worker in workers:
        worker.close(until - monotonic())
