"""DeepSpeed's logger as another name of the logger "shardwise", with its level, handlers and messages."""

from __future__ import annotations

import json
import logging
import sys
from functools import lru_cache
from typing import Any, cast

from shardwise.errors import UsageError
from shardwise.utils.logging import log_dist as log_dist
from shardwise.utils.logging import logger as _ours

LEVELS: dict[str, int] = {
    name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error", "critical")
}


class DeepSpeedLogger(logging.Logger):
    """The logger "DeepSpeed": passes messages and level on to the logger "shardwise"."""

    def setLevel(self, level: int | str) -> None:
        """Set the level of both."""
        _ours.setLevel(level)
        super().setLevel(level)

    def warning_once(self, message: str, *args: Any) -> None:
        """Log a warning once in this process."""
        _warn_once(str(message), *args)


@lru_cache(maxsize=256)
def _warn_once(message: str, *args: Any) -> None:
    logger.warning(message, *args)


def _make() -> DeepSpeedLogger:
    found = logging.getLogger("DeepSpeed")
    # The logger may exist already, and must stay the same object.
    found.__class__ = DeepSpeedLogger
    found.parent = _ours
    return cast(DeepSpeedLogger, found)


logger = _make()


@lru_cache(maxsize=256)
def _log_once(message: str, ranks: tuple[int, ...] | None, level: int) -> None:
    log_dist(message, None if ranks is None else list(ranks), level)


def log_dist_once(message: str, ranks: list[int] | None = None, level: int = logging.INFO) -> None:
    """Log as `log_dist`, once in this process for the same arguments."""
    _log_once(str(message), None if ranks is None else tuple(ranks), level)


def _is_printed(ranks: list[int] | None) -> bool:
    from shardwise.comm.api import get_rank, is_initialized

    return not is_initialized() or not ranks or ranks == [-1] or get_rank() in ranks


def print_dist(message: str, ranks: list[int] | None = None) -> None:
    """Print on some ranks; `ranks` None, empty or [-1]: all."""
    from shardwise.comm.api import get_rank

    if _is_printed(ranks):
        print(f"[rank {get_rank()}] {message}", flush=True)


def print_json_dist(message: dict[str, Any], ranks: list[int] | None = None, path: str | None = None) -> None:
    """Write a dictionary with the rank as JSON on some ranks (None, empty, [-1]: all), to a file or stdout."""
    from shardwise.comm.api import get_rank

    if not _is_printed(ranks):
        return
    text = json.dumps({**message, "rank": get_rank()})
    if path is None:
        print(text, flush=True)
    else:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Set the level of a logger (None: DeepSpeed's) by name: debug, info, warning, error or critical. Raises UsageError
    if the name is unknown.
    """
    (custom_logger or logger).setLevel(_level(log_level_str))


def get_current_level() -> int:
    """Return the effective level."""
    return logger.getEffectiveLevel()


def should_log_le(max_log_level_str: str) -> bool:
    """Return True if the effective level is at most the named one."""
    return get_current_level() <= _level(max_log_level_str)


def _level(name: str) -> int:
    try:
        return LEVELS[name.lower()]
    except (KeyError, AttributeError):
        raise UsageError(f"log level {name!r}: expected one of {', '.join(LEVELS)}") from None


class LoggerFactory:
    """Factory of further loggers."""

    @staticmethod
    def create_logger(name: str | None = None, level: int = logging.WARNING) -> logging.Logger:
        """Return a logger that writes to standard output. Raises UsageError without a name."""
        if name is None:
            raise UsageError("LoggerFactory.create_logger(name): give the logger a name")
        made = logging.getLogger(name)
        made.setLevel(level)
        made.propagate = False
        if not made.handlers:
            made.addHandler(logging.StreamHandler(sys.stdout))
        return made
