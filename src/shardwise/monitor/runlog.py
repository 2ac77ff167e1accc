"""Run log: one row for each step and each warning of a rank, in files that survive the process.

A worker thread (`worker`) assembles and writes rows, because neither a slow disk nor a late device may delay training.
`shardwise.runfiles` defines the files.
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

_LONGEST_TEXT = 10_000  # maximum characters of a warning
_STARTS = 100  # number of recorded job starts in one directory


class Line(NamedTuple):
    """A line for a file of the run directory, with its line end; for `run.json`, the whole content."""

    file: str
    text: str


def plain(value: Any) -> Any:
    """Return a value as JSON. Infinity and NaN become strings.

    Numbers below a million have seven significant digits, others three decimals.

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
    """One row, assembled when it is written; `finish` adds values that are slow to compute."""

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
        """Return the line, waiting for pending copies."""
        row = self._values
        for event in self._pending.read() if self._pending is not None else ():
            row[event.name] = event.value
        if self._finish is not None:
            self._finish(row)
        return [Line(self._file, json.dumps(plain(row), separators=(",", ":")) + "\n")]


class RunFiles(Service[Line]):
    """The files of one rank in a run directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def open(self) -> None:
        """Create the directory."""
        self._directory.mkdir(parents=True, exist_ok=True)

    def log(self, events: Sequence[Line]) -> None:
        """Append lines, batched by file; replace `run.json`."""
        lines: dict[str, str] = {}
        for line in events:
            if line.file == RUN:
                self._replace(line.text)
            else:
                lines[line.file] = lines.get(line.file, "") + line.text
        for name, text in lines.items():
            append(self._directory / name, text)

    def flush(self) -> None:
        """Do nothing, because written lines survive the process."""

    def close(self) -> None:
        """Do nothing, because no file stays open."""

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
    try:
        starts = json.loads(path.read_text(encoding="utf-8"))["starts"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return starts if isinstance(starts, list) else []


class RunLog:
    """Run log of one rank; `step` returns the number of steps taken.

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
        """Replace the description of the run, which has at least `time`, `world` and `step`."""
        self._worker.put(Row(RUN, {"format": FORMAT, **about}))

    def write_step(
        self,
        values: dict[str, Any],
        pending: Pending | None = None,
        finish: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        """Write the row of a step asynchronously. Arguments as of `Row`."""
        self._worker.put(Row(steps_file(self._rank), values, pending, finish))

    def write_event(self, level: str, text: str, step: int, facts: Mapping[str, Any]) -> None:
        """Write a warning asynchronously; `facts` has `kind`, `advice`, another `step`, and values of the kind."""
        row = {"time": time.time(), "step": step, "kind": "warning", **facts}
        row |= {"rank": self._rank, "level": level, "text": text[:_LONGEST_TEXT]}
        self._worker.put(Row(events_file(self._rank), row), now=True)  # the process may be about to end

    def flush(self, limit: float = CLOSE_S) -> bool:
        """Wait up to `limit` seconds until all rows are written; return True if they are."""
        return self._worker.flush(limit)

    def end(self) -> None:
        """Refuse new rows, and end after the pending ones, without waiting."""
        logger.removeHandler(self._handler)
        self._worker.end()

    def close(self) -> None:
        """Write pending rows. A second call does nothing."""
        logger.removeHandler(self._handler)
        self._worker.close()


class _Warnings(logging.Handler):
    """Writes warnings of the library's logger into the run log, with the fields of `extra={"event": {...}}`."""

    def __init__(self, log: RunLog, step: Callable[[], int]) -> None:
        super().__init__(logging.WARNING)
        self._log = log
        self._step = step

    def emit(self, record: logging.LogRecord) -> None:
        try:
            facts = getattr(record, "event", None)
            known = facts if isinstance(facts, Mapping) else {}
            self._log.write_event(record.levelname.lower(), record.getMessage(), self._step(), known)
        except Exception:  # the displaying handler reports a message that cannot be formatted
            self.handleError(record)
