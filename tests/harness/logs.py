"""Keeps what the library logs, on ranks as well."""

from __future__ import annotations

import logging
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
