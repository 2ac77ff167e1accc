"""Reader of run directories: valid files are used, damaged ones are reported in notes."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.errors import ReportError
from shardwise.runfiles import FORMAT, RUN, TIMELINES, kind_and_rank

from .rows import Row, number

MOST_ROWS = 4000  # maximum rows of a rank; consecutive rows of longer runs are merged
MOST_EVENTS = 500  # maximum warnings of a rank; the newest are kept
MOST_SPANS = 200_000  # maximum number of timeline spans
MOST_TEXT = 2000  # maximum characters of a text
LARGEST = 512 << 20  # maximum bytes of a timeline or of `run.json`

Event = Mapping[str, Any]


@dataclass(frozen=True)
class Span:
    """A timeline span on a `lane` (thread or stream), in microseconds since a common moment of all ranks."""

    rank: int
    lane: str
    name: str
    category: str
    start: float
    length: float


@dataclass
class Run:
    """Content of a run directory."""

    path: Path
    about: dict[str, Any] = field(default_factory=dict)  # content of `run.json`; empty if unreadable
    rows: dict[int, list[Row]] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # unreadable content
    resumed: list[int] = field(default_factory=list)  # steps from which a job has resumed

    def note(self, text: str) -> None:
        """Add a note about unreadable content."""
        self.notes.append(text)


def read_run(path: Path) -> Run:
    """Read a run directory; raises a ReportError if the directory does not exist, or has no run."""
    if not path.is_dir():
        found = "is a file" if path.exists() else "does not exist"
        raise ReportError(
            f"{path}: {found}; expected a run directory, as the section run_log of the configuration makes"
        )
    try:
        names = sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        raise ReportError(f"{path}: cannot be read: {error.strerror}") from error
    run = Run(path)
    files = {name: known for name in names if (known := kind_and_rank(name)) is not None}
    timelines = sorted(path.glob(TIMELINES))
    if not files and RUN not in names and not timelines:
        raise ReportError(
            f"{path}: nothing of a run is here (no {RUN}, no steps-*.jsonl). Name the directory that run_log.path of "
            f"the configuration says{_children(path)}"
        )
    _read_about(run)
    for name, (kind, rank) in files.items():
        if kind == "steps":
            _read_steps(run, name, rank)
        else:
            _read_events(run, name, rank)
    for timeline in timelines:
        _read_timeline(run, timeline)
    run.events.sort(key=lambda event: number(event.get("time")) or 0.0)
    run.resumed = sorted(set(run.resumed))
    return run


def _children(path: Path) -> str:
    with contextlib.suppress(OSError):
        inside = sorted(entry.parent.name for entry in path.glob(f"*/{RUN}"))
        if inside:
            return f", such as {path / inside[-1]}"
    return ""


def _read_about(run: Run) -> None:
    path = run.path / RUN
    try:
        if path.stat().st_size > LARGEST:
            raise ValueError(f"it has {path.stat().st_size} bytes")
        about = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(about, dict):
            raise ValueError("it is not an object")
    except FileNotFoundError:
        run.note(f"{RUN} is missing: model, configuration and plan are not known")
        return
    except OSError as error:
        run.note(f"{RUN} cannot be read ({error.strerror}): model, configuration and plan are not known")
        return
    except (ValueError, RecursionError) as error:
        run.note(f"{RUN} is damaged ({error}): model, configuration and plan are not known")
        return
    if about.get("format") != FORMAT:
        run.note(
            f"{RUN}: format {str(about.get('format'))[:40]}, and this version of shardwise reads format {FORMAT}; what "
            "is shown may be incomplete"
        )
    run.about = about


def _objects(run: Run, name: str) -> Iterator[dict[str, Any]]:
    damaged: list[int] = []
    last = 0
    ended = True
    try:
        with open(run.path / name, "rb") as file:
            for last, line in enumerate(file, 1):
                ended = line.endswith(b"\n")
                if not line.strip():
                    continue
                try:
                    found = json.loads(line)
                except (ValueError, RecursionError):
                    found = None
                if isinstance(found, dict):
                    yield found
                else:
                    damaged.append(last)
    except OSError as error:
        run.note(f"{name} cannot be read: {error.strerror}")
        return
    if damaged == [last] and not ended:
        run.note(f"{name}: the last line is not whole; the process was writing it, or was killed")
    elif damaged:
        many = len(damaged) > 1
        run.note(f"{name}: {len(damaged)} line{'s' * many} damaged (the first is line {damaged[0]}), left out")


def _read_steps(run: Run, name: str, rank: int) -> None:
    rows: list[Row] = []
    wrong = 0
    for found in _objects(run, name):
        row = Row.of(found)
        if row is None:
            wrong += 1
            continue
        if rows and row.step <= rows[-1].step:
            run.resumed.append(row.first - 1)
            while rows and rows[-1].step >= row.first:
                rows.pop()
        rows.append(row)
        if len(rows) >= 2 * MOST_ROWS:
            rows = [one.then(other) for one, other in zip(rows[::2], rows[1::2], strict=True)]
    if wrong:
        run.note(f"{name}: {wrong} line{'s' * (wrong > 1)} without a step, left out")
    if rows:
        run.rows[rank] = rows
    else:
        run.note(f"{name}: no step was written")


def _read_events(run: Run, name: str, rank: int) -> None:
    kept: list[Event] = []
    count = 0
    for found in _objects(run, name):
        count += 1
        kept.append({**found, "rank": rank})
        if len(kept) >= 2 * MOST_EVENTS:
            del kept[:MOST_EVENTS]
    run.events += kept[-MOST_EVENTS:]
    if count > MOST_EVENTS:
        run.note(f"{name}: {count} warnings, of which the last {MOST_EVENTS} are shown")


def _read_timeline(run: Run, path: Path) -> None:
    name = path.name
    try:
        if path.stat().st_size > LARGEST:
            run.note(f"{name}: {path.stat().st_size >> 20} MiB are too much for a page; look at it in ui.perfetto.dev")
            return
        found = json.loads(path.read_bytes())
    except OSError as error:
        run.note(f"{name} cannot be read: {error.strerror}")
        return
    except (ValueError, RecursionError) as error:
        run.note(f"{name} is damaged ({error}), and left out")
        return
    events = found.get("traceEvents") if isinstance(found, dict) else found
    if not isinstance(events, list):
        run.note(f"{name}: no list of trace events is in it")
        return
    lanes: dict[tuple[Any, Any], str] = {}
    for event in events:
        if isinstance(event, dict) and event.get("ph") == "M" and event.get("name") == "thread_name":
            named = event.get("args")
            if isinstance(named, dict) and isinstance(named.get("name"), str):
                lanes[str(event.get("pid")), str(event.get("tid"))] = named["name"][:60]
    wrong = 0
    for event in events:
        if not isinstance(event, dict) or event.get("ph") != "X":
            wrong += not isinstance(event, dict)
            continue
        start, length, rank = number(event.get("ts")), number(event.get("dur", 0)), event.get("pid")
        if start is None or length is None or not math.isfinite(start + length) or not isinstance(rank, int):
            wrong += 1
            continue
        lane = lanes.get((str(rank), str(event.get("tid"))), str(event.get("tid"))[:60])
        if len(run.spans) < MOST_SPANS:
            what, category = str(event.get("name", ""))[:120], str(event.get("cat", ""))[:40]
            run.spans.append(Span(rank, lane, what, category, start, max(length, 0.0)))
    if wrong:
        run.note(f"{name}: {wrong} event{'s' * (wrong > 1)} without a rank or a time, left out")
