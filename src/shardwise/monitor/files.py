"""CSV and JSON-lines backends: each call appends whole lines unbuffered, which survive the process."""

from __future__ import annotations

import contextlib
import csv
import fcntl
import io
import json
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .service import Event, Service

_LONGEST = 200  # maximum characters of a file name, below the file systems' limit of 255 bytes


class CSVFiles(Service[Event]):
    """Service of the section `csv_monitor`: one file for each name, one line for each event."""

    def __init__(self, section: Any) -> None:
        self._directory = Path(section.output_path) / section.job_name

    def open(self) -> None:
        """Create the directory."""
        self._directory.mkdir(parents=True, exist_ok=True)

    def log(self, events: Sequence[Event]) -> None:
        """Append one line for each event."""
        series: dict[str, list[Event]] = {}
        for event in events:
            series.setdefault(event.name, []).append(event)
        for name, members in series.items():
            lines = _csv((event.step, event.value) for event in members)
            file = re.sub(r"[/\\]", "_", name)[:_LONGEST] + ".csv"
            append(self._directory / file, lines, header=_csv([("step", name.rpartition("/")[2])]))


class JSONLines(Service[Event]):
    """Service of the section `jsonl_monitor`: one file with one object for each event."""

    def __init__(self, section: Any) -> None:
        self._path = Path(section.output_path) / section.job_name / "events.jsonl"

    def open(self) -> None:
        """Create the directory."""
        self._path.parent.mkdir(parents=True, exist_ok=True)

    def log(self, events: Sequence[Event]) -> None:
        """Append one line for each event. Infinity and NaN, which JSON lacks, are written as strings."""
        lines = []
        for event in events:
            value = event.value if math.isfinite(event.value) else str(event.value)
            line = {"name": event.name, "value": value, "step": event.step, "time": round(event.time, 3)}
            lines.append(json.dumps(line) + "\n")
        append(self._path, "".join(lines))


def _csv(rows: Any) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def append(path: Path, lines: str, header: str = "") -> None:
    """Append whole lines to a file, creating it with `header` as its first line if needed."""
    with open(path, "ab+", buffering=0) as file:
        # Without the lock a line that another writer has half written looks like the remains of a full disk. The lock
        # ends with the file. File systems without locks raise.
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        size = file.seek(0, os.SEEK_END)
        begin = header
        if size:
            # A full disk may have left a partial line, which is ended here to protect the next line.
            file.seek(size - 1)
            begin = "" if file.read(1) == b"\n" else "\n"
        content = memoryview((begin + lines).encode())
        while content:
            content = content[file.write(content) :]
