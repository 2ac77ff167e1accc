"""Memory watchdog: a thread that ends the job with a message before the kernel's OOM killer does.

It polls the free physical memory and control groups' limits, with reclaimable page cache as free: every half second,
and more often when processes could use up the free memory within that time.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable

from shardwise.memory.limits import control_groups, lowest_free, physical_bytes
from shardwise.units import format_size

EVERY_S = 0.5
"""Seconds between two checks with much free memory."""
SHORTEST_S = 0.01
FILLED_A_SECOND = 8 << 30
"""Assumed allocation rate of a machine's processes in bytes a second."""
EXIT_CODE = 12
"""Exit code of the process: the number of ENOMEM."""
_PART, _MOST = 0.02, 256 << 20


def margin_of(total: int) -> int:
    """Return the required free bytes of a limit: 2 % of it, at most 256 MiB.

    >>> margin_of(1 << 30) >> 20, margin_of(1 << 40) >> 20
    (20, 256)
    """
    return min(int(_PART * total), _MOST)


class Watchdog:
    """Memory watchdog, active until it is closed or freed.

    `report` returns the message when memory runs out, from the newest checkpoint, if any. `look` returns the limit with
    the least free memory: name, size and free bytes. `end` ends the process with an exit code, from any thread.
    """

    def __init__(
        self,
        report: Callable[[str | None], str],
        look: Callable[[], tuple[str, int, int]] | None = None,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self.checkpoint: Callable[[], str | None] = lambda: None
        self._report = report
        total = physical_bytes()
        groups = [group for group in control_groups() if group.limit < total]
        self._closed = threading.Event()
        arguments = (weakref.ref(self), self._closed, look or (lambda: lowest_free(groups)), end)
        self._thread = threading.Thread(target=_watch, args=arguments, name="shardwise-watchdog", daemon=True)
        self._thread.start()

    def report(self) -> str:
        """Return the message when memory runs out."""
        return self._report(self.checkpoint())

    def close(self) -> None:
        """Stop the thread."""
        self._closed.set()
        self._thread.join()


def _watch(
    reference: weakref.ref[Watchdog],
    closed: threading.Event,
    look: Callable[[], tuple[str, int, int]],
    end: Callable[[int], object],
) -> None:
    wait = 0.0
    while not closed.wait(wait) and reference() is not None:
        try:
            name, total, left = look()
        except (OSError, ValueError):
            return  # the limits are unreadable
        above = left - margin_of(total)
        if above > 0:
            wait = min(EVERY_S, max(SHORTEST_S, above / FILLED_A_SECOND))
            continue
        watchdog = reference()
        if watchdog is not None:
            _write(
                f"*** shardwise: {format_size(left)} are left of {name} ({format_size(total)}). {watchdog.report()}\n"
            )
            end(EXIT_CODE)
        return


def _write(text: str) -> None:
    """Write to the file descriptor, because another thread may hold the lock of Python's stream."""
    try:
        number = sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):
        number = 2
    os.write(number, text.encode())
