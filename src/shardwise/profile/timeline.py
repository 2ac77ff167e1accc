"""Timeline of one rank: recording of ranges and collectives during steps, and conversion to a trace.

A `Recorder` keeps the ends of each range (`shardwise.device.ranges`) and the flight recorder's records; on a CUDA
device, CUDA events that it reads after the last step. The conversion computes times of rank 0's clock, tracks and idle
gaps. Memory is bounded: after `most` spans nothing is kept, and the trace notes it. The trace has the JSON object
format of the Trace Event Format, which ui.perfetto.dev and chrome://tracing open.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from typing_extensions import override

from shardwise.comm.clocks import LABEL, Clock, between
from shardwise.comm.ledger import Record, Watcher, user_line
from shardwise.comm.stragglers import key_of
from shardwise.device.clock import Instant, now
from shardwise.device.ranges import Listener

Event = dict[str, Any]  # an event of a trace

FORMAT = "shardwise-timeline-1"

# Category -> number and name of its first track; overlapping events that are not nested use the next tracks.
TRACKS: dict[str, tuple[int, str]] = {
    "compute": (10, "compute"),
    "step": (20, "step"),
    "wait": (30, "host waits"),
    "gather": (40, "gathers"),
    "reduce": (50, "reductions"),
    "collective": (60, "other collectives"),
    "move": (70, "moves"),
    "idle": (90, "idle"),
    "stage": (100, "stage"),  # of a pipeline: the number of the stage is added to both
    "message": (100, "stage"),
}

FLIGHTS_TRACK = (80, "moves under way")

# Range name -> category. Launches of all-gathers and reductions are host work and belong to compute.
CATEGORIES: dict[str, str] = {
    "forward": "compute",
    "backward": "compute",
    "gather": "compute",
    "reduce": "compute",
    "boundary": "step",
    "step": "step",
    "wait for gather": "wait",
    "wait for reduction": "wait",
    "acquire": "move",
    "wait for tensors": "move",
    "store": "move",
    "wait for store": "move",
    "copy": "move",
    "bring": "move",
    "take": "move",
    "action": "stage",
    "message": "message",
}

_SHOWN = {"gather": "launch gather of", "reduce": "launch reduction of", "boundary": "end of the window"}
_PHASES = ("forward", "backward", "step")
_OF_GATHERS, _OF_REDUCTIONS = ("gather", "gather_on"), ("reduce", "reduce_on", "replicate")
_LEAST_IDLE_US = 1.0


class Span(NamedTuple):
    """A finished range, or a finished asynchronous operation."""

    what: str
    unit: str
    size: int
    begun: Instant
    ended: Instant
    line: str
    step: int
    flight: bool


class _Around:
    __slots__ = ("_begun", "_line", "_recorder", "_size", "_step", "_unit", "_what")

    def __init__(self, recorder: Recorder, what: str, unit: str, size: int) -> None:
        self._recorder, self._what, self._unit, self._size = recorder, what, unit, size

    def __enter__(self) -> None:
        self._line, self._step = user_line(), self._recorder.step()
        self._begun = now(self._recorder.cuda)

    def __exit__(self, *_: object) -> None:
        ended = now(self._recorder.cuda)
        self._recorder.keep(Span(self._what, self._unit, self._size, self._begun, ended, self._line, self._step, False))


class Recorder(Listener, Watcher):
    """Records up to `most` ranges and the flight recorder's collectives; `left_out` counts the others.

    `cuda`: work runs on the current CUDA device. `sizes` are the bytes of each unit. `memory` returns bytes by
    category, and is called at the end of each phase.
    """

    ranges: frozenset[str] | None = None

    def __init__(
        self,
        *,
        cuda: bool,
        most: int,
        step: Callable[[], int],
        sizes: Mapping[str, int],
        memory: Callable[[], Mapping[str, int]],
    ) -> None:
        self.cuda = cuda
        self.step = step
        self.sizes = sizes
        self.left_out = 0
        self.most = most
        self._memory = memory
        self._spans: list[Span] = []
        self._records: dict[int, tuple[Record, int, Instant]] = {}  # by sequence: with its step and opening time
        self._ends: dict[int, Instant] = {}
        self._counters: list[tuple[Instant, Mapping[str, int]]] = []
        self._lock = threading.Lock()
        self.begun = now(cuda)
        self._first = self._anchor(self.begun)
        self._last = self._first
        self.ended = self.begun

    def _anchor(self, instant: Instant) -> tuple[float, Instant]:
        if isinstance(instant, float):
            return instant, instant
        instant.synchronize()
        return time.perf_counter(), instant

    # -- while steps run ---------------------------------------------------------------------------------------------

    @override
    def around(self, what: str, unit: str, size: int) -> AbstractContextManager[Any]:
        return _Around(self, what, unit, size)

    @override
    def flight(self, what: str, unit: str, size: int) -> Callable[[], None]:
        begun, line, step = now(self.cuda), user_line(), self.step()

        def landed() -> None:
            self.keep(Span(what, unit, size, begun, now(self.cuda), line, step, True))

        return landed

    @override
    def opened(self, record: Record) -> None:
        with self._lock:
            if self._room():
                self._records[record.sequence] = record, self.step(), now(self.cuda)

    @override
    def closed(self, record: Record) -> None:
        if record.sequence in self._records:
            self._ends[record.sequence] = now(self.cuda)

    def keep(self, span: Span) -> None:
        """Keep a span; at the end of a phase, also the memory by category."""
        with self._lock:
            if self._room():
                self._spans.append(span)
                if not span.unit and span.what in _PHASES:
                    self._counters.append((span.ended, self._memory()))

    def _room(self) -> bool:
        if len(self._spans) + len(self._records) < self.most:
            return True
        self.left_out += 1
        return False

    def finish(self) -> None:
        """Stop recording, waiting for all streams of the device, because `events` reads CUDA events of each."""
        if self.cuda:
            torch.cuda.synchronize()
        self.ended = now(self.cuda)
        self._last = self._anchor(self.ended)

    # -- afterwards --------------------------------------------------------------------------------------------------

    def events(self, rank: int, host: str, clock: Clock, later: Clock | None) -> list[Event]:
        """Return the events of the trace, after `finish`.

        `clock` and `later` are the offsets to rank 0's
        clock at the beginning and, if measured, at the end.
        """

        def microseconds(instant: Instant) -> float:
            here = self._on_host(instant)
            return 1e6 * (here + between(clock, later, here))

        found = [self._of_span(span, microseconds) for span in self._spans]
        found += [
            self._of_record(record, step, opened, microseconds)
            for record, step, opened in self._records.values()
            if record.finished is not None and record.sequence in self._ends and record.label != LABEL
        ]
        if self.cuda:
            _blame_streams(found)
        found += self._other_waits(microseconds)
        found += _idle(found, microseconds(self.begun), microseconds(self.ended))
        for event in found:
            event["pid"] = rank
        names = _lay_out(found)
        found += [
            {
                "name": "memory",
                "cat": "memory",
                "ph": "C",
                "ts": round(microseconds(at), 3),
                "pid": rank,
                "tid": 0,
                "args": {name: size for name, size in sizes.items() if size},
            }
            for at, sizes in self._counters
        ]
        found.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))
        return _named(rank, host, names) + found

    def _on_host(self, instant: Instant) -> float:
        if isinstance(instant, float):
            return instant
        (start, first), (end, last) = self._first, self._last
        since = first.elapsed_time(instant) / 1e3
        whole = first.elapsed_time(last) / 1e3
        return start + since * (
            (end - start) / whole if whole > 0 else 1.0
        )  # corrects the drift between host and device clocks

    def _of_span(self, span: Span, microseconds: Callable[[Instant], float]) -> Event:
        args = {"unit": span.unit, "bytes": span.size or self.sizes.get(span.unit, 0), "line": span.line}
        begun = microseconds(span.begun)
        category = CATEGORIES.get(span.what, "compute")
        name = f"{_SHOWN.get(span.what, span.what)} {span.unit}".rstrip()
        if category in ("stage", "message"):
            name, _, stage = span.unit.rpartition(" stage ")
            args["stage"] = int(stage)
        return {
            "name": name,
            "cat": category,
            "ph": "X",
            "ts": begun,
            "dur": max(0.0, microseconds(span.ended) - begun),
            "tid": FLIGHTS_TRACK[0] if span.flight else 0,
            "args": {**args, "what": span.what, "step": span.step},
        }

    def _of_record(
        self,
        record: Record,
        step: int,
        opened: Instant,
        microseconds: Callable[[Instant], float],
    ) -> Event:
        assert record.finished is not None
        begun = microseconds(opened if self.cuda else record.launched)
        ended = microseconds(self._ends[record.sequence] if self.cuda else record.finished)
        args = {
            "unit": record.label,
            "bytes": record.size,
            "sent": record.sent,
            "line": record.line,
            "step": step,
            "op": record.op,
            "kind": record.kind,
            "turn": record.turn,
            "group": record.group,
            "ranks": record.ranks,
            "id": key_of(record),
            "waited": round(1e6 * (record.waited or 0.0), 3),
        }
        return {
            "name": f"{record.op} {record.label}".rstrip(),
            "cat": category_of(record.kind),
            "ph": "X",
            "ts": begun,
            "dur": max(0.0, ended - begun),
            "tid": 0,
            "args": args,
        }

    def _other_waits(self, microseconds: Callable[[Instant], float]) -> list[Event]:
        found = []
        for record, step, _ in self._records.values():
            other = category_of(record.kind) == "collective" and record.label != LABEL
            if other and record.finished is not None and record.waited:
                begun = microseconds(record.finished - record.waited)
                args = {"unit": record.label, "bytes": record.size, "line": record.line}
                found.append(
                    {
                        "name": f"wait for {record.op} {record.label}".rstrip(),
                        "cat": "wait",
                        "ph": "X",
                        "ts": begun,
                        "dur": max(0.0, microseconds(record.finished) - begun),
                        "tid": 0,
                        "args": {**args, "what": "wait for collective", "step": step},
                    }
                )
        return found


def _blame_streams(events: Sequence[Event]) -> None:
    """Set the time that the compute stream waited for each all-gather and reduction."""
    stood: dict[tuple[str, str], list[Event]] = {}
    for event in events:
        if event["cat"] == "wait":
            kind = "gather" if event["args"]["what"] == "wait for gather" else "reduce"
            stood.setdefault((kind, event["args"]["unit"]), []).append(event)
    for event in events:
        if "turn" in event["args"]:
            start, stop = event["ts"], event["ts"] + event["dur"]
            waits = stood.get((event["cat"], event["args"]["unit"]), [])
            both = [min(stop, wait["ts"] + wait["dur"]) - max(start, wait["ts"]) for wait in waits]
            event["args"]["waited"] = round(sum(seconds for seconds in both if seconds > 0), 3)


def category_of(kind: str) -> str:
    """Return the track category of a collective."""
    return "gather" if kind in _OF_GATHERS else "reduce" if kind in _OF_REDUCTIONS else "collective"


def _idle(events: Iterable[Event], begun: float, ended: float) -> list[Event]:
    busy = sorted(
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event["tid"] == 0 and event["cat"] in ("compute", "step", "wait", "move")
    )
    found, last = [], begun
    for start, stop in [*busy, (ended, ended)]:
        if start - last >= _LEAST_IDLE_US:
            args = {"unit": "", "bytes": 0, "line": "", "step": -1}
            found.append(
                {"name": "idle", "cat": "idle", "ph": "X", "ts": last, "dur": start - last, "tid": 0, "args": args}
            )
        last = max(last, stop)
    return found


def _lay_out(events: list[Event]) -> dict[int, str]:
    """Assign tracks of disjoint or nested events, with times rounded to nanoseconds; return the track names."""
    names: dict[int, str] = {}
    open_until: dict[int, list[float]] = {}
    events.sort(key=lambda event: (event["ts"], -event["dur"]))
    for event in events:
        first, name = FLIGHTS_TRACK if event["tid"] else TRACKS[event["cat"]]
        if "stage" in event["args"]:
            first, name = first + event["args"]["stage"], f"{name} {event['args']['stage']}"
        start, stop = round(event["ts"], 3), round(event["ts"] + event["dur"], 3)
        event["ts"], event["dur"] = start, round(stop - start, 3)
        for place in range(first, first + 9):
            ends = open_until.setdefault(place, [])
            while ends and ends[-1] <= start:
                ends.pop()
            if not ends or stop <= ends[-1] or place == first + 8:
                break
        if ends and stop > ends[-1]:  # practically unreachable number of concurrent events
            event["dur"] = round(ends[-1] - start, 3)
        ends.append(round(start + event["dur"], 3))
        event["tid"] = place
        names[place] = name if place == first else f"{name} ({place - first + 1})"
    return names


def _named(rank: int, host: str, tracks: Mapping[int, str]) -> list[Event]:

    def metadata(name: str, tid: int, /, **args: Any) -> Event:
        return {"name": name, "ph": "M", "pid": rank, "tid": tid, "args": args}

    found = [
        metadata("process_name", 0, name=f"rank {rank} on {host}"),
        metadata("process_sort_index", 0, sort_index=rank),
    ]
    for tid, name in sorted(tracks.items()):
        found += [metadata("thread_name", tid, name=name), metadata("thread_sort_index", tid, sort_index=tid)]
    return found


def file_of(rank: int) -> str:
    """Return the file name of a rank's timeline, such as timeline-00003.json."""
    return f"timeline-{rank:05d}.json"


def write(path: Path, events: Sequence[Event], **about: Any) -> None:
    """Write a trace atomically, with the metadata `about`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    hidden = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(hidden, "w") as file:
            head = {"displayTimeUnit": "ms", "otherData": {"format": FORMAT, **about}}
            file.write(json.dumps(head)[:-1] + ', "traceEvents": [\n')
            file.write(",\n".join(map(json.dumps, events)))
            file.write("\n]}\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(hidden, path)
    finally:
        hidden.unlink(missing_ok=True)


def hostname() -> str:
    """Return the name of this machine."""
    return socket.gethostname()
