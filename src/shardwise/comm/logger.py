"""The communication log: count, bytes and speed of each collective of engines (ledgers) and of `shardwise.comm`.

Sizes are in bytes, latency in milliseconds, bandwidth in Gbit/s. For n ranks and t seconds, algorithm bandwidth is size
/ t (2 * size / t for all-reduce). Bus bandwidth corrects for the bytes that a ring must move: all-reduce size / t * 2
(n - 1) / n; gather- and scatter-like collectives (with the size of the whole) and all-to-all size / t * (n - 1) / n.
Averages leave out the fastest and slowest tenth.

Memory is bounded: of each operation and size the newest times are kept; counts and totals are complete. In a step an
engine's collectives are only queued. They are added up when the log is read, or when many have come.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.comm.stragglers import Part, parts_of
from shardwise.device.clock import seconds_between
from shardwise.errors import ConfigError, UsageError
from shardwise.units import format_size
from shardwise.utils.logging import log_dist, logger, warn_once

if TYPE_CHECKING:
    from shardwise.comm.communicator import Communicator
    from shardwise.comm.ledger import Ledger, Record

Entry = list[Any]
"""[count, latencies in ms, algorithm bandwidths, bus bandwidths] of one collective at one size."""

_SIZES = 512  # of an operation; a further size counts as the next power of two
_KEPT = 4096  # least number of kept times of one operation and size; the most is twice as many

UNKNOWN = "-"
"""Printed for an unknown time."""

SETTINGS = ("enabled", "prof_all", "prof_ops", "verbose", "debug", "path")
"""Of the log, as in the configuration's section `comms_logger`."""

_SHARED = ("all_gather", "reduce_scatter", "all_to_all")  # of the message a rank keeps a part
_KEPT_RECORDS = 4096  # collectives of engines that are kept one by one
_AT_ONCE = 256  # collectives that are added up together, in a few milliseconds at most
_WAITING = 4096  # most queued collectives of engines; older ones that are not known to have ended count without a time
_MOST_LINES = 1 << 16  # collectives that wait to be written into the file
_EVERY_S = 1.0


def bandwidths(op: str, size: int, seconds: float, world: int) -> tuple[float, float]:
    """Return (algorithm bandwidth, bus bandwidth) in Gbit/s of one call, by the module's conventions."""
    if seconds <= 0:
        return 0.0, 0.0
    twice = "all_reduce" in op
    algorithm = (2 if twice else 1) * size / seconds * 8 / 1e9
    shared = world > 1 and (twice or op.startswith(_SHARED))
    return algorithm, algorithm * (world - 1) / world if shared else algorithm


def trimmed_mean(values: Sequence[float], trim: float = 0.1) -> float:
    """Return the mean without the lowest and highest `trim` of the values; the median stays. 0 of nothing."""
    ordered = sorted(values)
    cut = min(int(len(ordered) * trim), max(0, (len(ordered) - 1) // 2))
    kept = ordered[cut : len(ordered) - cut]
    return sum(kept) / len(kept) if kept else 0.0


class _Entry(list[Any]):
    """An `Entry` with the sum of all latencies, also of those no longer kept."""

    def __init__(self) -> None:
        super().__init__([0, [], [], []])
        self.total_ms = 0.0

    def add(self, measured: Sequence[float]) -> None:
        self[0] += 1
        if measured:
            self.total_ms += measured[0]
            for column, value in zip(self[1:], measured, strict=True):
                column.append(value)
                if len(column) >= 2 * _KEPT:
                    del column[:_KEPT]


@dataclass(slots=True)
class Call:
    """A collective that has been waited for; `size` in bytes of the whole message.

    `seconds` are from launch to the end of waiting; None: unknown, or known to the device of `record`. `record` is of
    an engine's ledger; None: a collective of a script, which the log calls `name`.
    """

    op: str
    size: int
    world: int
    line: str
    seconds: float | None
    record: Record | None = None
    name: str = ""
    time: float = field(default_factory=time.time)

    def known(self) -> bool:
        """Return True if reading the time does not wait for the device."""
        return self.record is None or self.record.ended is None or bool(self.record.ended.query())

    def read(self) -> Sequence[float]:
        """Set the time, waiting for the device; return it in ms and the bandwidths, or nothing if it is unknown."""
        if self.record is not None and self.record.ended is not None:
            self.seconds = seconds_between(self.record.begun, self.record.ended)
        if self.seconds is None:
            return ()
        return (self.seconds * 1e3, *bandwidths(self.op, self.size, self.seconds, self.world))

    def as_json(self, rank: int, measured: Sequence[float]) -> str:
        """Return the line of the file."""
        record = self.record
        waited = None if record is None else record.waited
        row = {
            "time": round(self.time, 6),
            "step": None if record is None else record.step,
            "rank": rank,
            "op": self.name or self.op,
            "group": "" if record is None else record.group,
            "unit": "" if record is None else record.label,
            "bytes": self.size,
            "sent": None if record is None else record.sent,
            "waited_ms": None if waited is None else round(waited * 1e3, 4),
            "ms": round(measured[0], 4) if measured else None,
            "busbw_gbps": round(measured[2], 4) if measured else None,
            "line": self.line,
        }
        return json.dumps(row) + "\n"


class LogFile:
    """Appends a line for each collective to `rank_N.jsonl` in a directory (`comms_logger.path`), created if missing.

    A thread writes whole lines once a second: these outlive the process. Calls beyond the queue's limit are dropped and
    counted. `add_up` is called before each writing: the log then gives the calls whose time is known.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, directory: str, rank: int, add_up: Callable[[], None]) -> None:
        self.path = Path(directory) / f"rank_{rank}.jsonl"
        self.dropped = 0
        self._rank, self._add_up = rank, add_up
        self._queue: deque[tuple[Call, Sequence[float]]] = deque()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(f"comms_logger.path: {self.path} cannot be written: {error.strerror}") from error
        self._writing = threading.Lock()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shardwise-comms-log", daemon=True)
        self._thread.start()

    def put(self, call: Call, measured: Sequence[float]) -> None:
        """Queue a call."""
        if len(self._queue) < _MOST_LINES:
            self._queue.append((call, measured))
        else:
            self.dropped += 1

    def flush(self) -> None:
        """Write queued calls; a disk error is logged once, and ends the file."""
        with self._writing:
            calls = [self._queue.popleft() for _ in range(len(self._queue))]
            rest = memoryview("".join(call.as_json(self._rank, measured) for call, measured in calls).encode())
            try:
                while rest and self._file >= 0:
                    rest = rest[os.write(self._file, rest) :]
            except OSError as error:
                self._close()
                logger.warning("comms_logger.path: %s: %s; it is written no further", self.path, error.strerror)
        if self.dropped:
            warn_once(f"comms_logger.path: {self.path}: collectives come faster than lines; some are missing")

    def close(self) -> None:
        """Write queued calls, and close the file."""
        self._end.set()
        self._thread.join()
        self.flush()
        self._close()

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def _run(self) -> None:
        while not self._end.wait(_EVERY_S):
            self._add_up()
            self.flush()


class CommsLogger:
    """Collects latencies by operation and size while `enabled`; `file` gets a line for each call (None: no file)."""

    def __init__(self) -> None:
        self._entries: dict[str, dict[int, Entry]] = {}
        self.enabled = self.verbose = self.debug = False
        self.prof_all = True
        self.prof_ops: list[str] = []
        self.file: LogFile | None = None
        self._records: deque[Record] = deque(maxlen=_KEPT_RECORDS)
        self._on_devices: weakref.WeakSet[Ledger] = weakref.WeakSet()
        self._waiting: deque[Call] = deque()
        self._adding = threading.Lock()

    @property
    def comms_dict(self) -> dict[str, dict[int, Entry]]:
        """Operation name -> size in bytes -> `Entry`. May be replaced by an empty dict."""
        self._add_up()
        return self._entries

    @comms_dict.setter
    def comms_dict(self, entries: dict[str, dict[int, Entry]]) -> None:
        self._add_up()
        self._entries = entries

    def configure(
        self,
        *,
        enabled: bool | None = None,
        prof_all: bool | None = None,
        prof_ops: Sequence[str] | None = None,
        verbose: bool | None = None,
        debug: bool | None = None,
        path: str | None = None,
    ) -> None:
        """Change settings; None leaves a setting unchanged.

        Args:
            enabled: record calls.
            prof_all: record every operation.
            prof_ops: recorded operations without `prof_all`.
            verbose: print each operation as it ends.
            debug: append the caller's line to the recorded name.
            path: directory of the file; "" closes the file.

        Raises:
            ConfigError: the file cannot be written.
        """
        self._add_up()
        given = {"enabled": enabled, "prof_all": prof_all, "verbose": verbose, "debug": debug}
        for name, value in given.items():
            if value is not None:
                setattr(self, name, value)
        for ledger in list(self._on_devices):
            ledger.timed = self.enabled
        if prof_ops is not None:
            self.prof_ops = list(prof_ops)
        if path is not None:
            self._write_to(path)

    def _write_to(self, directory: str) -> None:
        import torch.distributed as dist

        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        made = LogFile(directory, rank, self._add_up) if directory else None
        # After an uncaught exception the device may wait for ranks that do not come.
        self._add_up(wait=self.file is not None and getattr(sys, "last_value", None) is None)
        former, self.file = self.file, made
        if former is not None:
            former.close()
        atexit.unregister(self._write_to)
        if made is not None:
            atexit.register(self._write_to, "")

    def wants(self, op: str) -> bool:
        """Return True if an operation is recorded."""
        return self.enabled and (self.prof_all or op in self.prof_ops)

    def append(
        self,
        op: str,
        size: int,
        seconds: float | None,
        world: int,
        line: str = "",
        *,
        name: str = "",
        requested: bool = False,
    ) -> None:
        """Record one call: `size` bytes of the whole message in `seconds` over `world` ranks; `requested`: in any case.
        `name`: in the log, instead of `op`.

        `seconds` is None where the host does not know the time, because with NCCL only the device waits.
        """
        if requested or self.wants(name or op):
            self._enter(Call(op, size, world, line, seconds, name=name))

    def put(self, on_host: bool, record: Record) -> None:
        """Record a collective of an engine after the wait for it.

        Without `on_host` the device has waited; its events give the time without a wait in a step.
        """
        if self.wants(record.op):
            seconds = (record.finished or record.launched) - record.launched if on_host else None
            self._records.append(record)
            self._enter(Call(record.op, record.size, record.ranks, record.line, seconds, record))

    def _enter(self, call: Call) -> None:
        self._waiting.append(call)
        if self.verbose or len(self._waiting) % _AT_ONCE == 0:
            self._add_up()

    def _add_up(self, *, wait: bool = False) -> None:
        waiting = self._waiting
        with self._adding:
            while waiting and (wait or (known := waiting[0].known()) or len(waiting) > _WAITING):
                call = waiting.popleft()
                self._add(call, call.read() if wait or known else ())

    def _add(self, call: Call, measured: Sequence[float]) -> None:
        name = call.name or call.op
        name = f"{name} | {call.line}" if self.debug and call.line else name
        sizes = self._entries.setdefault(name, {})
        size = call.size if call.size in sizes or len(sizes) < _SIZES else 1 << max(call.size - 1, 0).bit_length()
        entry = sizes.get(size)
        if not isinstance(entry, _Entry):
            entry = sizes[size] = _Entry()
        entry.add(measured)
        if self.file is not None:
            self.file.put(call, measured)
        if self.verbose:
            texts = [f"{value:.2f}" for value in measured] or [UNKNOWN] * 3
            log_dist(
                f"comm op: {name} | time (ms): {texts[0]} | msg size: {format_size(call.size)} | "
                f"algbw (Gbps): {texts[1]} | busbw (Gbps): {texts[2]}",
                [0],
            )

    def listen(self, comm: Communicator) -> None:
        """Record the collectives of an engine while `enabled`."""
        comm.ledger.listener = functools.partial(self.put, comm.waits_on_host)
        if comm.device.type == "cuda":
            self._on_devices.add(comm.ledger)
            comm.ledger.timed = self.enabled

    def parts(self) -> list[Part]:
        """Return this rank's parts in the newest collectives of engines, in times of this rank."""
        return parts_of(list(self._records), lambda at: at)

    def start_profiling_comms(self) -> None:
        """Record every operation from now on."""
        self.configure(enabled=True, prof_all=True)

    def stop_profiling_comms(self) -> None:
        """Record only the operations of `prof_ops`."""
        self.prof_all = False

    def start_profiling_op(self, op_name_list: Sequence[str]) -> None:
        """Record these operations, too."""
        self.configure(enabled=True, prof_ops=[*dict.fromkeys([*self.prof_ops, *op_name_list])])

    def stop_profiling_op(self, op_name_list: Sequence[str]) -> None:
        """Remove operations from `prof_ops`."""
        self.prof_ops = [name for name in self.prof_ops if name not in op_name_list]

    def settle(self) -> None:
        """Wait for the times of all collectives, and write the file. Methods that return a summary do so themselves."""
        self._add_up(wait=True)
        if self.file is not None:
            self.file.flush()

    def get_raw_data(self) -> dict[str, dict[int, Entry]]:
        """Return a copy of the log."""
        self.settle()
        return {
            name: {size: [entry[0], *map(list, entry[1:])] for size, entry in sizes.items()}
            for name, sizes in self.comms_dict.items()
        }

    def get_operation_summary(self, operation_name: str) -> dict[int, dict[str, float]]:
        """Return the `summary` of one operation; empty if it has not been recorded."""
        return self.summary().get(operation_name, {})

    def log_all(self, print_log: bool = True, show_straggler: bool = False) -> dict[str, dict[int, dict[str, float]]]:
        """Print the summary on this rank, and return it.

        Raises:
            UsageError: `show_straggler` is True, which only the collective `shardwise.comm.log_summary` can do.
        """
        if show_straggler:
            raise UsageError("log_all(show_straggler=True): call comm.log_summary(show_straggler=True) on every rank")
        if print_log:
            print(self.table(), flush=True)
        return self.summary()

    def reset_data(self) -> None:
        """Clear the log. Collectives that a device has not completed are in the file without a time."""
        self._add_up()
        with self._adding:
            while self._waiting:
                call = self._waiting.popleft()
                if self.file is not None:
                    self.file.put(call, ())
        self.comms_dict = {}
        self._records.clear()

    def has_data(self) -> bool:
        """Return True if the log is not empty."""
        return bool(self.comms_dict)

    def get_operation_names(self) -> list[str]:
        """Return the recorded names."""
        return list(self.comms_dict)

    def get_total_operations(self) -> int:
        """Return the number of recorded calls."""
        return sum(entry[0] for sizes in self.comms_dict.values() for entry in sizes.values())

    def summary(self) -> dict[str, dict[int, dict[str, float]]]:
        """Return count, total and mean latency (ms) and mean bandwidths (Gbit/s) by operation and size; 0: unknown."""
        self.settle()
        return {
            name: {
                size: {
                    "count": entry[0],
                    "total_latency_ms": entry.total_ms if isinstance(entry, _Entry) else sum(entry[1]),
                    "avg_latency_ms": trimmed_mean(entry[1]),
                    "tput_avg_gbps": trimmed_mean(entry[2]),
                    "busbw_avg_gbps": trimmed_mean(entry[3]),
                }
                for size, entry in sorted(sizes.items())
            }
            for name, sizes in self.comms_dict.items()
        }

    def table(self) -> str:
        """Return the summary as text."""
        units = ("Total Latency(ms)", "Avg Latency(ms)", "tput_avg (Gbps)", "busbw_avg (Gbps)")
        lines = ["".join(f"{column:<20}" for column in ("Comm. Op", "Message Size", "Count", *units))]
        for name, sizes in self.summary().items():
            lines.append(name)
            for size, row in sizes.items():
                measured = bool(self.comms_dict[name][size][1])
                count, *values = row.values()
                cells = [
                    "",
                    format_size(size),
                    str(count),
                    *(f"{value:.2f}" if measured else UNKNOWN for value in values),
                ]
                lines.append("".join(f"{cell:<20}" for cell in cells))
        return "\n".join(lines)


comms_logger = CommsLogger()
"""The communication log of this process."""
