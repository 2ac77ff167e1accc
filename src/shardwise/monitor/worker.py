"""A service on a thread of its own: whoever hands events over never waits for it.

What is handed over is kept in a queue of limited length, which the thread empties every `PAUSE_S`: whoever hands over
wakes nobody, and files are opened, and threads change places, once for many steps. A service that raises is tried
again, after longer and longer pauses; one that is slow or gone for too long loses the oldest events. Both are logged.

One thread for each service, and not one for all: a service that hangs holds up no other, so files are written at once
whatever the network does.
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

PAUSE_S = 1.0
"""From one look at the queue to the next; as much is lost at most if the process is killed."""
ROOM = 20_000
"""Events that are kept for a service; about a quarter of an hour at 4 steps a second."""
AT_ONCE = 1000
"""Events that a service is given in one call, unless one call of `write_events` has more."""
ATTEMPTS = 3
"""How often the same events are offered: what one service will never take must not be in the way for ever."""
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
TELL_AGAIN_S = 600.0
"""Failures that come and go are told no more often."""
CLOSE_S = 30.0
"""How long the end of a run waits for a service."""


class Worker:
    """See the module docstring.

    Args:
        name: of the service, for messages.
        service: is used by this thread only.
        room: events that are kept.
    """

    def __init__(self, name: str, service: Service[Any], room: int = ROOM) -> None:
        self.name = name
        self._service = service
        self._room = room
        self._queue: deque[EventBatch[Any]] = deque()
        self._changed = threading.Condition()
        self._held = self._lost = self._told_lost = 0
        self._busy = self._closing = self._is_open = False
        self._asked = False  # the queue is to be looked at now
        self._pause = SHORTEST_PAUSE_S
        self._failing = self._told_failing = False
        self._told_at = -TELL_AGAIN_S
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name=f"shardwise-monitor-{name}", daemon=True)
        _close_at_exit()
        _running.add(self)
        self._thread.start()

    # -- on the thread of training -------------------------------------------------------------------------------------

    def put(self, events: EventBatch[Any], *, now: bool = False) -> None:
        """Hand events over; those that have waited longest are dropped where there is no room.

        Args:
            events: to be written.
            now: have everything written at once.
        """
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
            much = self._held >= AT_ONCE and not self._asked
        if now or much:
            self.hurry()
        if dropped:
            logger.warning(
                "monitor %s: more than %d events wait for it, and the oldest are dropped; training goes on. Is the "
                "service reachable? How many are lost is told at the end, and when it is up to date again",
                self.name,
                self._room,
            )

    def flush(self, limit: float) -> bool:
        """Wait until everything is written, at most so many seconds; return whether it is."""
        self.hurry()
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue and not self._busy, limit)

    def hurry(self) -> None:
        """Have what waits written at once; does not wait for it."""
        with self._changed:
            self._asked = True
            self._changed.notify_all()

    def end(self) -> None:
        """Take nothing more, and end when everything is written; does not wait."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def close(self, limit: float = CLOSE_S) -> None:
        """Take nothing more, and wait until everything is written and the service has ended, but not longer than so
        many seconds. Closing twice does nothing.
        """
        if os.getpid() != self._process:
            return  # a copy of the process, which does not have the thread
        self.end()
        self._thread.join(max(0.0, limit))
        _running.discard(self)
        if self._thread.is_alive():
            logger.warning(
                "monitor %s: has not ended in time, and is left; %d events are not known to be written",
                self.name,
                self._held,
            )
        self._tell_lost()

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
        """Return what is offered next; nothing if the end has come."""
        with self._changed:
            while not ((self._queue and self._asked) or self._closing):
                if not self._changed.wait(PAUSE_S):
                    self._asked = True
            taken: list[EventBatch[Any]] = []
            while self._queue and sum(map(len, taken)) < AT_ONCE:
                taken.append(self._queue.popleft())
            self._busy, self._asked = bool(taken), bool(self._queue)
            return taken

    def _deliver(self, taken: list[EventBatch[Any]]) -> None:
        events: list[Any] = []
        for pending in taken:
            try:
                events.extend(pending.read())
            except RuntimeError as error:  # the device has failed, and with it what was on it
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
            if self._told_failing:
                logger.info("monitor %s: works again", self.name)
        if not self._queue:
            self._tell_lost()
        return True

    def _failed(self, error: BaseException) -> None:
        if self._failing:
            return
        self._failing = True
        self._told_failing = monotonic() - self._told_at >= TELL_AGAIN_S
        if self._told_failing:
            self._told_at = monotonic()
            logger.warning(
                "monitor %s: %s: %s. Training goes on. It is tried again, and up to %d events are kept meanwhile; to "
                "do without it, set %s.enabled to false",
                self.name,
                type(error).__name__,
                str(error).rstrip("."),
                self._room,
                self.name,
            )

    def _tell_lost(self) -> None:
        lost = self._lost
        if lost > self._told_lost:
            logger.warning("monitor %s: %d events are lost since the beginning", self.name, lost)
            self._told_lost = lost


_running: weakref.WeakSet[Worker] = weakref.WeakSet()


@functools.cache
def _close_at_exit() -> None:
    """Have all services ended when the program has come to its end, before their packages do something of their own.

    Functions of `atexit` run last registered first, and packages register theirs whenever a service opens: W&B would
    stop the process that it writes with, while events still wait. Python calls those of `threading` before; it does not
    promise to keep them, so `atexit` is the other way.
    """
    register = getattr(threading, "_register_atexit", atexit.register)
    register(_close_all)


def _close_all() -> None:
    until = monotonic() + CLOSE_S
    workers = list(_running)
    for worker in workers:
        worker.end()
    for worker in workers:
        worker.close(until - monotonic())
