"""Signals that ask for a checkpoint: noted when they come, agreed upon at the end of a step.

A signal may reach one rank only, and at any moment. So its handler writes it down and does nothing else. At the next
step what every rank has noted travels along with the all-reduce of that step; afterwards all ranks know, at the same
step, and act together.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any

from shardwise.errors import UsageError
from shardwise.utils.logging import logger

_NEVER = ("SIGKILL", "SIGSTOP")

TELL_S = 5.0
"""A signal that has not been acted upon for so many seconds is said; then after four times as many, and so on."""


def signal_named(name: str) -> signal.Signals:
    """Return the signal of a name such as "SIGTERM".

    Raises:
        UsageError: there is none, or nobody can handle it.

    >>> int(signal_named("SIGTERM"))
    15
    """
    found = getattr(signal.Signals, name, None) if isinstance(name, str) else None
    if found is None or name in _NEVER:
        raise UsageError(
            f"checkpoint on a signal: expected the name of a signal that can be handled, such as 'SIGTERM' or "
            f"'SIGUSR1', found {name!r}"
        )
    return signal.Signals(found)


class SignalWatch:
    """Notes signals of this process; see the module. There is one at a time: the last that has been told to listen."""

    _listening: SignalWatch | None = None

    def __init__(self) -> None:
        self._watched: list[signal.Signals] = []
        self._noted: set[int] = set()
        self._due: set[signal.Signals] = set()
        self._before: dict[signal.Signals, Any] = {}
        self._process = os.getpid()
        self._waiting: tuple[signal.Signals, float] | None = None

    def listen(self, signals: Iterable[signal.Signals]) -> None:
        """Handle these signals from now on, and no others; all ranks watch the same.

        Raises:
            UsageError: this is not the main thread, in which Python handles signals.
        """
        if threading.current_thread() is not threading.main_thread():
            raise UsageError(
                "checkpoint on a signal: signals are handled by the main thread, and this is another one; call "
                "initialize() and engine.checkpoint_on_signal() in the main thread"
            )
        other = SignalWatch._listening
        if other is not None:
            if other is not self:
                logger.warning(
                    "checkpoints on signals are from now on those of another engine, the last that has asked"
                )
            other.close()
        SignalWatch._listening = self
        self._process = os.getpid()
        atexit.register(_say_at_exit, weakref.ref(self))
        self._watched = sorted(set(signals))
        for number in self._watched:
            self._before[number] = signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            # A child process that has been forked off is not a rank; to it the signal means what it means elsewhere.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self._noted.add(number)
        if self._waiting is None:
            self._waiting = signal.Signals(number), time.monotonic()
            threading.Thread(target=self._tell, name="shardwise-signal", daemon=True).start()

    def _tell(self) -> None:
        """Say from time to time that nothing is saved yet: it may not come to that before the job is killed."""
        after = TELL_S
        while True:
            time.sleep(after)
            waiting = self._waiting
            if waiting is None:
                return
            waited = time.monotonic() - waiting[1]
            logger.warning(
                "%s was received %.0f s ago, and NO checkpoint is saved yet: that is done at the end of the step, for "
                "which all ranks are needed. Is a rank stuck, or does the step take that long? "
                "engine.check_signals() saves where no step is taken",
                waiting[0].name,
                waited,
            )
            after = 3 * waited

    def done(self) -> None:
        """What was asked for is done."""
        self._waiting = None

    def say_undone(self) -> None:
        """Say that the process ends, and that what was asked for has not been done."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None and os.getpid() == self._process:
            logger.error(
                "%s was received %.0f s ago, and this process ends without having saved a checkpoint for it",
                waiting[0].name,
                time.monotonic() - waiting[1],
            )

    def facts(self, rank: int) -> list[float]:
        """Return for each watched signal whether it has come since the last call; these are added up over ranks."""
        if not self._watched:
            return []
        noted, self._noted = self._noted, set()
        for number in sorted(noted):
            logger.info("rank %d has received %s", rank, signal.Signals(number).name)
        return [float(number in noted) for number in self._watched]

    def hear(self, sums: Sequence[float]) -> None:
        """Take what the ranks have said: the sums of `facts`. What was said before `listen` is passed over."""
        if len(sums) == len(self._watched):
            self._due.update(number for number, count in zip(self._watched, sums, strict=True) if count)

    def take_due(self) -> set[signal.Signals]:
        """Return the signals that all ranks know of and have not acted on yet."""
        due, self._due = self._due, set()
        return due

    def close(self) -> None:
        """Give the signals back to those who handled them before."""
        self.say_undone()
        for number, handler in self._before.items():
            # None: a handler that was not installed by Python, and cannot be put back by it.
            if signal.getsignal(number) == self._note and handler is not None:
                signal.signal(number, handler)
        self._watched, self._before, self._noted, self._due = [], {}, set(), set()
        if SignalWatch._listening is self:
            SignalWatch._listening = None


def _say_at_exit(watch: weakref.ref[SignalWatch]) -> None:
    found = watch()
    if found is not None:
        found.say_undone()
