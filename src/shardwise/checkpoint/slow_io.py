"""Waiting for a disk or a writer process: with warnings, and a timeout."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from shardwise.utils.logging import logger

WARN_AFTER_S = 10.0
"""Seconds before the first warning; each later one after four times as long."""

SLOWEST = 20e6
"""Bytes per second; a slower disk counts as not responding."""

_STATES = {
    "T": "is stopped (by SIGSTOP, or a debugger)",
    "t": "is stopped (by a debugger)",
    "D": "waits for a disk or a file system",
    "Z": "has ended",
}


@dataclass(frozen=True)
class Progress:
    """Another process of this user: kernel's letter of its state ("" if unknown), bytes written (0 if unknown)."""

    state: str = ""
    written: int = 0

    @classmethod
    def of(cls, pid: int) -> Progress:
        """Return the progress from the kernel, without disk access."""
        state, written = "", 0
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
                state = file.read().rpartition(")")[2].split()[0]
            with open(f"/proc/{pid}/io", encoding="utf-8") as file:
                written = next(int(line.split()[1]) for line in file if line.startswith("wchar:"))
        return cls(state, written)

    @property
    def stuck(self) -> bool:
        """Whether the process only waits for other processes."""
        return self.state in _STATES

    def __str__(self) -> str:
        """Return it in words.

        >>> print(Progress("T"))
        is stopped (by SIGSTOP, or a debugger)
        """
        return _STATES.get(self.state, "works, or waits for the other ranks")


@contextlib.contextmanager
def warn_if_slow(what: str) -> Iterator[None]:
    """Log from time to time that the block has not ended yet; `what` names its action."""
    ended = threading.Event()
    began = time.monotonic()

    def watch() -> None:
        after = WARN_AFTER_S
        while not ended.wait(after):
            waited = time.monotonic() - began
            logger.warning(
                "%s: it has taken %.0f s so far, and goes on (is the disk slow, or does it not answer?)", what, waited
            )
            after = 3 * waited

    threading.Thread(target=watch, name="shardwise-slow-io", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
