"""The run log: a row for each step and for each warning of a rank, in files that outlive the process.

Rows are put together and written on a thread of the log's own (`worker`), so that neither a slow disk nor a device that
is behind holds up training. See `shardwise.runfiles` for the files.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shardwise.runfiles import FORMAT, RUN, events_file, steps_file
from shardwise.utils.logging import logger

from .files import append
from .pending import Pending
from .service import Service
from .worker import CLOSE_S, Worker

_LONGEST_TEXT = 10_000
"""Characters of a warning that are kept."""
_STARTS = 100
"""Starts of a job in one directory that are remembered."""


class Line(NamedTuple):
    """What goes into a file.

    Attributes:
        file: name in the directory.
        text: a line with its end; of `run.json` the content.
    """

    file: str
    text: str


def plain(value: Any) -> Any:
    """Return a value in the form of JSON. Infinity and NaN, which JSON has not, are strings; numbers below a million
    have seven digits, others three behind the point.

    >>> plain({"a": (1, 0.123456789, float("inf"))})
    {'a': [1, 0.1234568, 'inf']}
    """
    if isinstance(value, float):
        if not math.isfinite(value):
            return str(value)
        return float(f"{value:.7g}") if abs(value) < 1e6 else round(value, 3)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return str(value)


class Row:
    """One row, which is put together when it is written.

    Args:
        file: name in the directory.
        values: what is known already.
        pending: what may still be on a device; the names of its events are those of values.
        finish: adds what takes a while to find.
    """

    def __init__(
        self,
        file: str,
        values: dict[str, Any],
        pending: Pending | None = None,
        finish: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self._file = file
        self._values = values
        self._pending = pending
        self._finish = finish

    def __len__(self) -> int:
        return 1

    def read(self) -> list[Line]:
        """Return the line, waiting for values that are still under way."""
        row = self._values
        for event in self._pending.read() if self._pending is not None else ():
            row[event.name] = event.value
        if self._finish is not None:
            self._finish(row)
        return [Line(self._file, json.dumps(plain(row), separators=(",", ":")) + "\n")]


class RunFiles(Service[Line]):
    """The files of one rank in a run directory.

    Args:
        directory: is made if it is not there.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def open(self) -> None:
        """Make the directory."""
        self._directory.mkdir(parents=True, exist_ok=True)

    def log(self, events: Sequence[Line]) -> None:
        """Append lines, each file's at once; `run.json` takes the place of the one before."""
        lines: dict[str, str] = {}
        for line in events:
            if line.file == RUN:
                self._replace(line.text)
            else:
                lines[line.file] = lines.get(line.file, "") + line.text
        for name, text in lines.items():
            append(self._directory / name, text)

    def flush(self) -> None:
        """Lines are with the system already, and outlive the process."""

    def close(self) -> None:
        """No file is left open."""

    def _replace(self, text: str) -> None:
        path = self._directory / RUN
        about = json.loads(text)
        about["starts"] = [*_starts(path), {name: about[name] for name in ("time", "world", "step")}][-_STARTS:]
        hidden = path.with_name(f".{RUN}.{os.getpid()}")
        try:
            with open(hidden, "w", encoding="utf-8") as file:
                file.write(json.dumps(about, indent=1))
                file.flush()
                os.fsync(file.fileno())
            os.replace(hidden, path)
        finally:
            with contextlib.suppress(OSError):
                hidden.unlink()


def _starts(path: Path) -> list[Any]:
    """Return when jobs have begun to write here before; none if that cannot be read."""
    try:
        starts = json.loads(path.read_text(encoding="utf-8"))["starts"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return starts if isinstance(starts, list) else []


class RunLog:
    """What one rank writes of a run.

    Args:
        directory: of the run.
        rank: this process in the job.
        step: returns how many steps have been taken.

    Attributes:
        directory: see there.

    Example:
        >>> import pathlib, tempfile, torch
        >>> log = RunLog(pathlib.Path(tempfile.mkdtemp()), rank=0, step=lambda: 1)
        >>> log.write_step({"step": 1}, Pending([("loss", torch.tensor(0.5), 1)]))
        >>> log.close()
        >>> (log.directory / "steps-00000.jsonl").read_text()
        '{"step":1,"loss":0.5}\\n'
    """

    def __init__(self, directory: Path, rank: int, step: Callable[[], int]) -> None:
        self.directory = directory
        self._rank = rank
        self._worker = Worker("run_log", RunFiles(directory))
        self._handler = _Warnings(self, step)
        logger.addHandler(self._handler)

    def write_run(self, about: Mapping[str, Any]) -> None:
        """Write what is run, in place of what was written before.

        Args:
            about: what is known of the run; has at least `time`, `world` and `step`.
        """
        self._worker.put(Row(RUN, {"format": FORMAT, **about}))

    def write_step(
        self,
        values: dict[str, Any],
        pending: Pending | None = None,
        finish: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        """Write what a step has been; returns at once. Arguments as of `Row`."""
        self._worker.put(Row(steps_file(self._rank), values, pending, finish))

    def write_event(self, level: str, text: str, step: int, facts: Mapping[str, Any]) -> None:
        """Write a warning; returns at once.

        Args:
            level: of the `logging` module.
            text: what was said.
            step: at which.
            facts: what else is known: `kind`, `advice`, another `step`, and whatever belongs to the kind.
        """
        row = {"time": time.time(), "step": step, "kind": "warning", **facts}
        row |= {"rank": self._rank, "level": level, "text": text[:_LONGEST_TEXT]}
        self._worker.put(Row(events_file(self._rank), row), now=True)  # it may be the last one

    def flush(self, limit: float = CLOSE_S) -> bool:
        """Wait until everything is written, but not longer than so many seconds; return whether it is."""
        return self._worker.flush(limit)

    def close(self) -> None:
        """Write what is left. Closing twice does nothing."""
        logger.removeHandler(self._handler)
        self._worker.close()


class _Warnings(logging.Handler):
    """Writes warnings of the library's logger into the run log, with what callers pass as `extra={"event": {...}}`."""

    def __init__(self, log: RunLog, step: Callable[[], int]) -> None:
        super().__init__(logging.WARNING)
        self._log = log
        self._step = step

    def emit(self, record: logging.LogRecord) -> None:
        """Write one."""
        try:
            facts = getattr(record, "event", None)
            known = facts if isinstance(facts, Mapping) else {}
            self._log.write_event(record.levelname.lower(), record.getMessage(), self._step(), known)
        except Exception:  # a message that cannot be put together is told by the handler that shows it
            self.handleError(record)
