"""Waiting for a disk or for a process that writes: said after seconds, and not for ever."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from shardwise.utils.logging import logger

TELL_S = 10.0
"""After so many seconds somebody who waits says so for the first time; then after four times as many, and so on."""

SLOWEST = 20e6
"""Bytes a second: a disk that is slower than this is taken for one that does not answer."""

_STATES = {
    "T": "is stopped (by SIGSTOP, or a debugger)",
    "t": "is stopped (by a debugger)",
    "D": "waits for a disk or a file system",
    "Z": "has ended",
}


@dataclass(frozen=True)
class Progress:
    """What another process of this user has done.

    Attributes:
        state: letter by which the kernel tells what it does; "" where it cannot be told.
        written: bytes that it has given to the system to write; 0 where it cannot be told.
    """

    state: str = ""
    written: int = 0

    @classmethod
    def of(cls, pid: int) -> Progress:
        """Ask the kernel, and no disk."""
        state, written = "", 0
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
                state = file.read().rpartition(")")[2].split()[0]
            with open(f"/proc/{pid}/io", encoding="utf-8") as file:
                written = next(int(line.split()[1]) for line in file if line.startswith("wchar:"))
        return cls(state, written)

    @property
    def stuck(self) -> bool:
        """Whether it does nothing, and not because it waits for others."""
        return self.state in _STATES

    def __str__(self) -> str:
        """Return it in words.

        >>> print(Progress("T"))
        is stopped (by SIGSTOP, or a debugger)
        """
        return _STATES.get(self.state, "works, or waits for the other ranks")


@contextlib.contextmanager
def told_if_long(what: str) -> Iterator[None]:
    """Say in the log, from time to time, that the block has not ended yet; `what` says what is done in it."""
    ended = threading.Event()
    began = time.monotonic()

    def watch() -> None:
        after = TELL_S
        while not ended.wait(after):
            waited = time.monotonic() - began
            logger.warning(
                "%s: it has taken %.0f s so far, and goes on (is the disk slow, or does it not answer?)", what, waited
            )
            after = 3 * waited

    threading.Thread(target=watch, name="shardwise-patience", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
