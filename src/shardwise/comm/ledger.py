"""The ledger (flight recorder): one record for every collective of an engine, in the order of launches.

Ranks of a sharded job make progress only while they launch the same collectives in the same order. The communication
log, tests of byte counts and desync reports read the same records.

Invariant: a record is appended before the launch. The last record of a stuck rank therefore names the collective that
the rank is stuck in. The ledger is a ring buffer: totals are complete, records are the newest `capacity`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol

from shardwise.compat import never_compiled
from shardwise.device.clock import Instant, now
from shardwise.device.streams import Mark, Streams

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_of_script: dict[str, bool] = {}
"""By file, the result of `is_of_script`; a cache, because every collective walks the stack."""
_here = threading.local()


@contextlib.contextmanager
def on_behalf_of(line: str) -> Iterator[None]:
    """Record `line` as the script's line of collectives that this thread launches in the block."""
    _here.line = line
    try:
        yield
    finally:
        del _here.line


@never_compiled
def user_line(frame: FrameType | None = None) -> str:
    """Return `file:line` of the innermost of 64 callers outside this package, torch and the standard library; "": none.

    `frame`: of another thread, instead of the callers.
    """
    if frame is None:
        if (line := getattr(_here, "line", None)) is not None:
            return str(line)
        frame = sys._getframe(1)
    for _ in range(64):
        if frame is None:
            return ""
        name = frame.f_code.co_filename
        of_script = _of_script.get(name)
        if of_script is None:
            of_script = _of_script[name] = is_of_script(name)
        if of_script:
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def is_of_script(file: str) -> bool:
    """Return True if a file belongs to neither this package nor torch."""
    return not (file.startswith((_PACKAGE, "<")) or f"{os.sep}torch{os.sep}" in file or file.endswith("contextlib.py"))


@dataclass(slots=True)
class Record:
    """One collective.

    Attributes:
        sequence: number of the collective in its engine, from 0.
        op: operation (`all_gather`, `reduce_scatter`, ...).
        group: name of the process group; `ranks`: their number; `members`: global numbers (empty: unknown).
        size: bytes of the whole message on this rank (the gathered or to-be-reduced buffer).
        sent: bytes that this rank sends, by the algorithm used.
        label: unit, parameter, or purpose such as `norm`.
        line: `file:line` of the user's code; `call`: of the script's call of the engine, if `line` is the model's.
        launched, finished: `time.perf_counter()` at launch and at the end of `wait()`.
        waited: seconds for which `wait()` has blocked the caller; None (as `finished`): in flight.
        kind: sequence of collectives (`groups.PURPOSES`), or empty; `turn`: number in it, the same on all ranks.
        step: optimizer steps that the engine had taken.
        narrow: it adds up values of 16 bits, which takes a CPU longer than those of 32.
        begun: event on the current stream at launch, where a device is timed (`Ledger.timed`).
        ended: event on the stream that may read the result.
        engine: `Ledger.engine`.
    """

    sequence: int
    op: str
    group: str
    size: int
    sent: int
    label: str
    line: str
    launched: float
    waited: float | None = None
    finished: float | None = None
    kind: str = ""
    ranks: int = 1
    turn: int = 0
    members: Sequence[int] = ()
    call: str = ""
    step: int = 0
    narrow: bool = False
    begun: Instant = None
    ended: Instant = None
    engine: str = ""


WAITING: dict[int, tuple[Any, float]] = {}
"""By thread of this process: the collective that the thread waits for, and since when (`time.perf_counter()`)."""


@contextlib.contextmanager
def waiting(what: object, since: float) -> Iterator[None]:
    """Enter a collective, which this thread waits for in the block, into `WAITING`."""
    thread = threading.get_ident()
    WAITING[thread] = what, since
    try:
        yield
    finally:
        WAITING.pop(thread, None)


_MOST_FOLLOWED = 1024  # because the host never runs more kernels ahead of its device
_followed: deque[tuple[Any, Mark, float]] | None = None
"""The last device collectives, an event behind each, and times of launches (`time.perf_counter()`); None: off. An entry
refers to no buffer, and to no `Work` of torch, which refers to its outputs.
"""


def follow_devices(on: bool) -> None:
    """Switch the following of device collectives on or off; forget the collectives followed so far."""
    global _followed
    _followed = deque(maxlen=_MOST_FOLLOWED) if on else None


def followed() -> deque[tuple[Any, Mark, float]] | None:
    """Return the followed collectives; None if following is off."""
    return _followed


def follow(what: object, streams: Streams) -> None:
    """Record an event on the current stream behind a collective, if following is on."""
    if _followed is not None:
        _followed.append((what, streams.mark(), time.perf_counter()))


class Watcher(Protocol):
    """Observes collectives, on the thread and the CUDA stream of each."""

    def opened(self, record: Record) -> None:
        """Called before the launch of a collective."""

    def closed(self, record: Record) -> None:
        """Called after the wait for a collective."""


@dataclass
class Totals:
    """Count of collectives of one kind, bytes of their messages (`size`), and bytes that this rank has sent."""

    count: int = 0
    size: int = 0
    sent: int = 0


def _both(first: Callable[[Record], None], second: Callable[[Record], None], record: Record) -> None:
    first(record)
    second(record)


@dataclass(eq=False)
class Ledger:
    """Ring buffer of `Record`, and totals by operation since the last reset.

    Attributes:
        listener: called with each complete record.
        step: returns the number of optimizer steps.
        timed: record CUDA events at launch and where the result may be read.
        engine: name of the engine, equal on its ranks.

    Example:
        >>> ledger = Ledger()
        >>> record = ledger.open("all_gather", "world", 1024, 512, "block.0")
        >>> ledger.close(record, waited=0.0)
        >>> ledger.totals["all_gather"].count
        1
    """

    capacity: int = 4096
    record_lines: bool = True
    sequence: int = 0
    call: str = ""
    totals: dict[str, Totals] = field(default_factory=dict)
    listener: Callable[[Record], None] | None = None
    watcher: Watcher | None = None
    step: Callable[[], int] | None = None
    timed: bool = False
    engine: str = ""
    _records: deque[Record] = field(init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def __post_init__(self) -> None:
        self._records = deque(maxlen=self.capacity)

    def open(self, op: str, group: str, size: int, sent: int, label: str, **given: Any) -> Record:
        """Append and return a record, with other attributes as `given`; called immediately before the launch."""
        line = user_line() if self.record_lines else ""
        step = 0 if self.step is None else self.step()
        with self._lock:  # chains are continued by threads of their own
            call = self.call if self.call != line else ""
            record = Record(
                self.sequence, op, group, size, sent, label, line, time.perf_counter(), call=call, step=step, **given
            )
            record.engine = self.engine
            self.sequence += 1
            self._records.append(record)
            totals = self.totals.setdefault(op, Totals())
            totals.count += 1
            totals.size += size
            totals.sent += sent
        watcher = self.watcher  # another thread may remove it
        if watcher is not None:
            watcher.opened(record)
        return record

    @contextlib.contextmanager
    def inside_call(self) -> Iterator[None]:
        """Set `call` of records in the block to the script's line that has called the engine."""
        before, self.call = self.call, user_line() if self.record_lines else ""
        try:
            yield
        finally:
            self.call = before

    def close(self, record: Record, waited: float, streams: Streams | None = None) -> None:
        """Complete a record after a wait of `waited` seconds for its collective; `streams`: the device waits."""
        if streams is not None and _followed is not None:
            _followed.append((record, streams.mark(), time.perf_counter()))
        record.waited = waited
        record.finished = time.perf_counter()
        watcher = self.watcher
        if watcher is not None:
            watcher.closed(record)
        if record.begun is not None:
            record.ended = now(cuda=True)
        if self.listener is not None:
            self.listener(record)

    def listen(self, listener: Callable[[Record], None]) -> None:
        """Add a listener, called after the present ones."""
        before = self.listener
        self.listener = listener if before is None else functools.partial(_both, before, listener)

    def records(self, since: int = 0) -> Iterator[Record]:
        """Yield the kept records from sequence number `since` on, oldest first."""
        return (record for record in list(self._records) if record.sequence >= since)

    def of_step(self, step: int) -> dict[str, dict[str, Totals]]:
        """Return totals of the kept records of a step, by operation and label.

        >>> ledger = Ledger(step=lambda: 3)
        >>> for unit in ("layers.0", "layers.1", "layers.0"):
        ...     _ = ledger.open("all_gather", "world", 1024, 512, unit)
        >>> ledger.of_step(3)["all_gather"]["layers.0"]
        Totals(count=2, size=2048, sent=1024)
        """
        found: dict[str, dict[str, Totals]] = {}
        for record in list(self._records):
            if record.step == step:
                totals = found.setdefault(record.op, {}).setdefault(record.label, Totals())
                totals.count += 1
                totals.size += record.size
                totals.sent += record.sent
        return found

    def in_flight(self) -> list[Record]:
        """Return the kept records of collectives that have not been waited for."""
        return [record for record in self._records if record.finished is None]

    def reset(self) -> None:
        """Clear records and totals; the sequence number continues."""
        self._records.clear()
        self.totals.clear()
