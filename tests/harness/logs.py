"""Keeps what the library logs, on ranks as well."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any


class Lines(logging.Handler):
    """Keeps the messages of log records, and the events that records have for programs."""

    def __init__(self, level: int = logging.NOTSET) -> None:
        super().__init__(level)
        self.lines: list[str] = []
        self.events: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        if (event := getattr(record, "event", None)) is not None:
            self.events.append(event)


@contextlib.contextmanager
def logged(level: int = logging.NOTSET) -> Iterator[Lines]:
    """Keep what the library logs inside of the block."""
    handler, logger = Lines(level), logging.getLogger("shardwise")
    logger.addHandler(handler)
    try:
        yield handler
    finally:
        logger.removeHandler(handler)
