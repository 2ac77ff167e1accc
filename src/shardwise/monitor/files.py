"""CSV files and JSON lines: whole lines, appended, given to the system at once, so that they outlive the process."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .service import Event, Service

_LONGEST = 200
"""Characters of the name of a file, below the limit of 255 bytes that file systems have."""


class CSVFiles(Service[Event]):
    """Section `csv_monitor`: a file for each name, with a line for each event.

    Args:
        section: has `output_path` and `job_name`.
    """

    def __init__(self, section: Any) -> None:
        self._directory = Path(section.output_path) / section.job_name

    def open(self) -> None:
        """Make the directory."""
        self._directory.mkdir(parents=True, exist_ok=True)

    def log(self, events: Sequence[Event]) -> None:
        """Append a line for each."""
        series: dict[str, list[Event]] = {}
        for event in events:
            series.setdefault(event.name, []).append(event)
        for name, members in series.items():
            lines = _csv((event.step, event.value) for event in members)
            file = re.sub(r"[/\\]", "_", name)[:_LONGEST] + ".csv"
            append(self._directory / file, lines, header=_csv([("step", name.rpartition("/")[2])]))


class JSONLines(Service[Event]):
    """Section `jsonl_monitor`: a file with an object for each event.

    Args:
        section: has `output_path` and `job_name`.
    """

    def __init__(self, section: Any) -> None:
        self._path = Path(section.output_path) / section.job_name / "events.jsonl"

    def open(self) -> None:
        """Make the directory."""
        self._path.parent.mkdir(parents=True, exist_ok=True)

    def log(self, events: Sequence[Event]) -> None:
        """Append a line for each. JSON has no infinity and no NaN: they are written as strings."""
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
    """Append whole lines to a file.

    Args:
        path: is made if it is not there.
        lines: with their ends.
        header: first line of a new file.
    """
    with open(path, "ab+", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        begin = header
        if size:
            # Half a line, where a disk was full: it is ended, so that none is spoilt but that one.
            file.seek(size - 1)
            begin = "" if file.read(1) == b"\n" else "\n"
        content = memoryview((begin + lines).encode())
        while content:
            content = content[file.write(content) :]
