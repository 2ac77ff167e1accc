"""Signals that request a checkpoint: recorded by the handler, agreed upon at the end of a step.

A signal may reach only one rank, at any moment. So the next step's all-reduce exchanges the records.
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

WARN_AFTER_S = 5.0
"""Seconds after which a pending signal is logged; again after four times as many, and so on."""


def signal_named(name: str) -> signal.Signals:
    """Return the signal of a name; a UsageError if it is unknown, or cannot be handled.

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
    """Records signals of this process. Only the instance that called `listen` last is active."""

    _listening: SignalWatch | None = None

    def __init__(self) -> None:
        self._watched: list[signal.Signals] = []
        self._noted: set[int] = set()
        self._due: set[signal.Signals] = set()
        self._before: dict[signal.Signals, Any] = {}
        self._process = os.getpid()
        self._waiting: tuple[signal.Signals, float] | None = None

    def listen(self, signals: Iterable[signal.Signals]) -> None:
        """Handle exactly these signals from now on; the same on all ranks. A UsageError outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            raise UsageError(
                "checkpoint on a signal: signals are handled by the main thread, and this is another one; call "
                "initialize() and engine.checkpoint_on_signal() in the main thread. In the other one of Ray, leave "
                "checkpoint.on_signal out, and call ray.train.get_preemption_info()"
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
            # A forked child is no rank: apply the signal's default action.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self._noted.add(number)
        if self._waiting is None:
            self._waiting = signal.Signals(number), time.monotonic()
            threading.Thread(target=self._tell, name="shardwise-signal", daemon=True).start()

    def _tell(self) -> None:
        """Warn repeatedly that no checkpoint is saved yet, because the job may be killed before."""
        after = WARN_AFTER_S
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
        """Mark the requested checkpoint as saved."""
        self._waiting = None

    def say_undone(self) -> None:
        """Log that the process exits without the requested checkpoint."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None and os.getpid() == self._process:
            logger.error(
                "%s was received %.0f s ago, and this process ends without having saved a checkpoint for it",
                waiting[0].name,
                time.monotonic() - waiting[1],
            )

    def facts(self, rank: int) -> list[float]:
        """Return, for each watched signal, whether it arrived since the last call; summed over ranks."""
        if not self._watched:
            return []
        noted, self._noted = self._noted, set()
        for number in sorted(noted):
            logger.info("rank %d has received %s", rank, signal.Signals(number).name)
        return [float(number in noted) for number in self._watched]

    def hear(self, sums: Sequence[float]) -> None:
        """Take the sums of `facts` over ranks. Sums from before `listen` are ignored."""
        if len(sums) == len(self._watched):
            self._due.update(number for number, count in zip(self._watched, sums, strict=True) if count)

    def take_due(self) -> set[signal.Signals]:
        """Return signals that all ranks know of and have not acted on."""
        due, self._due = self._due, set()
        return due

    def close(self) -> None:
        """Restore the previous signal handlers."""
        self.say_undone()
        for number, handler in self._before.items():
            # None: a handler that was not installed from Python and cannot be restored.
            if signal.getsignal(number) == self._note and handler is not None:
                signal.signal(number, handler)
        self._watched, self._before, self._noted, self._due = [], {}, set(), set()
        if SignalWatch._listening is self:
            SignalWatch._listening = None


def _say_at_exit(watch: weakref.ref[SignalWatch]) -> None:
    found = watch()
    if found is not None:
        found.say_undone()
