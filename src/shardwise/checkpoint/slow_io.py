"""Waiting for a disk: with warnings."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from shardwise.utils.logging import logger

WARN_AFTER_S = 10.0
"""Seconds before the first warning."""

SLOWEST = 20e6
"""Bytes per second; a slower disk counts as not responding."""


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
