"""Ending a job before the kernel does: a thread that looks at what is left of the machine's memory.

The kernel kills without a word. What is left is the least of what physical memory and control groups leave; pages of
files that can be given back are left, too. The thread looks every half second, and more often where less is left than
processes can take meanwhile.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

from shardwise.memory.limits import control_groups, lowest_free, physical_bytes
from shardwise.memory.report import readable

EVERY_S = 0.5
"""Seconds between two looks while much is left."""
SHORTEST_S = 0.01
FILLED_A_SECOND = 8 << 30
"""Bytes that the processes of a machine are taken to fill in a second."""
EXIT_CODE = 12
"""How the process ends: the number of ENOMEM."""
_PART, _MOST = 0.02, 256 << 20

Owner = TypeVar("Owner")
Look = Callable[[], tuple[str, int, int]]
"""Returns the limit that leaves least: its name, its size and what is left, in bytes."""


def margin_of(total: int) -> int:
    """Return what must be left of a limit: 2 % of it, and at most 256 MiB.

    >>> margin_of(1 << 30) >> 20, margin_of(1 << 40) >> 20
    (20, 256)
    """
    return min(int(_PART * total), _MOST)


class Watchdog(Generic[Owner]):
    """Watches until it is closed, or its owner is gone.

    Args:
        owner: for whom it watches; it does not keep it.
        tell: returns what is to be said when memory runs out; called with the owner.
        look: see `Look`.
        end: ends the process with an exit code, from any thread.

    Example:
        >>> class Training: ...
        >>> training = Training()
        >>> watchdog = Watchdog(training, lambda training: "")
        >>> watchdog.start()
        >>> watchdog.close()
    """

    def __init__(
        self,
        owner: Owner,
        tell: Callable[[Owner], str],
        look: Look | None = None,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        total = physical_bytes()
        groups = [group for group in control_groups() if group.limit < total]
        self._owner = weakref.ref(owner)
        self._tell = tell
        self._look = look or (lambda: lowest_free(groups))
        self._end = end
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to look."""
        self._thread = threading.Thread(target=self._watch, name="shardwise-watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        wait = 0.0
        while not self._closed.wait(wait) and self._owner() is not None:
            try:
                name, total, left = self._look()
            except (OSError, ValueError):
                return  # there is nothing to be read here
            above = left - margin_of(total)
            if above > 0:
                wait = min(EVERY_S, max(SHORTEST_S, above / FILLED_A_SECOND))
                continue
            owner = self._owner()
            if owner is not None:
                _say(f"*** shardwise: {readable(left)} are left of {name} ({readable(total)}). {self._tell(owner)}\n")
                self._end(EXIT_CODE)
            return


def _say(text: str) -> None:
    """Write past Python's own streams, on which another thread may just be writing."""
    try:
        number = sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):
        number = 2
    os.write(number, text.encode())
